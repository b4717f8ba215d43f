/* SPDX-License-Identifier: BSD-3-Clause */
/* What runs on the wire, and who runs it. nic->lock held where nothing else is said. */
#ifndef SOFTRNIC_TRANSPORT_TRANSPORT_H
#define SOFTRNIC_TRANSPORT_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "faults/fault.h"
#include "objects/nic.h"
#include "objects/queues.h"
#include "wire/wire.h"

struct srn_net;

/* --- timer.c --- */
/* Look at all that waits for a time no later than then. */
void srn_timer_at(struct srn_nic *nic, uint64_t at_ns);
/* A QP's timer was set. */
void srn_timer_set(struct srn_qp *qp, uint64_t at_ns);

/* --- hold.c --- */
void srn_hold(struct srn_nic *nic, enum fault_direction direction, struct srn_peer peer, const uint8_t *data,
              size_t len, uint32_t delay_us, bool overtaken_by_next);
/* A packet of this direction went on: those that it had to overtake follow. RX: on the progress thread. */
void srn_hold_passed(struct srn_nic *nic, enum fault_direction direction);
/* Release what is due; when the next will be, 0 = there is none. On the progress thread. */
uint64_t srn_hold_run(struct srn_nic *nic, uint64_t now_ns);
void srn_hold_clear(struct srn_nic *nic);

/* --- pace.c --- */
/* Does the QP's rate have nothing for a packet now? */
bool srn_pace_waits(const struct srn_qp *qp, uint64_t now_ns);
/* A packet of so many bytes of UDP payload goes to the link, that was due then. */
void srn_pace_sent(struct srn_qp *qp, uint64_t due_ns, uint64_t now_ns, size_t len);
/* When there will be something for another one behind all that wait, as it looks now. */
uint64_t srn_pace_next(const struct srn_qp *qp);

/* --- carry.c --- */
/* Send a sealed packet through the rail's links and queues; qpn is the sender's, or 0. */
void srn_carry(struct srn_nic *nic, uint32_t qpn, struct srn_peer to, const uint8_t *data, size_t len);
/* Let go on what is due; when the next will be, 0 = there is none. On the progress thread. */
uint64_t srn_carry_run(struct srn_nic *nic, uint64_t now_ns);
/* The NIC ends. What is on its way arrives at once, or never. */
void srn_carry_finish(struct srn_nic *nic, bool arrive);

/* --- link.c --- */
/* Open the socket and what else it takes to send; 0 or errno, and a sentence in err where there is more to say. */
int srn_link_open(struct srn_nic *nic, struct srn_net *net, char *err, size_t err_len);
/* Close what srn_link_open() opened, and every other descriptor of it. */
void srn_link_close(struct srn_nic *nic, struct srn_net *net);
void srn_link_after_fork(struct srn_nic *nic);
/* Where the next packet's payload (up to 4096 bytes) goes. */
uint8_t *srn_tx_payload(struct srn_nic *nic);
void srn_tx_commit(struct srn_nic *nic, struct wire_packet *pkt, size_t payload_len, uint32_t local_qpn,
                   struct srn_peer to);
void srn_tx_flush(struct srn_nic *nic);
/* A packet that was sealed before goes out. */
void srn_tx_datagram(struct srn_nic *nic, uint32_t dst_ip, const uint8_t *data, size_t len, uint8_t tos);
/* Does the rail have limits now? Then the socket is to tell of ECN's marks. */
void srn_link_watch_ecn(struct srn_nic *nic);
/* Before a batch is received: its slots are to take them. */
void srn_rx_want_marks(struct srn_net *net);
/* Has what was received into this slot one? */
bool srn_rx_marked(const struct srn_net *net, int slot);
/* Let go of nic->lock, once what was queued is sent and overrun CQs are dealt with. */
void srn_nic_unlock(struct srn_nic *nic);

/* --- congestion.c --- */
/* The senders of those of the n packets of a batch that are good and have the mark are to know. */
void srn_handle_marks(struct srn_nic *nic, int n);
/* A CNP from this address. */
void srn_handle_cnp(struct srn_nic *nic, const struct wire_packet *pkt, uint32_t src_ip);

/* --- requester.c --- */
void srn_req_reset(struct srn_qp *qp, uint32_t psn);
void srn_req_run(struct srn_qp *qp);
void srn_req_handle(struct srn_qp *qp, const struct wire_packet *pkt);
void srn_req_timer(struct srn_qp *qp, uint64_t now_ns);
/* The next packet of a SEND or WRITE; false if its memory is gone. Fills in pkt but for what all packets have. */
bool srn_send_data(struct srn_qp *qp, const struct srn_swqe *w, struct wire_packet *pkt);
enum ibv_wc_status srn_check_wqe(struct srn_qp *qp, const struct srn_swqe *w);
void srn_sq_check_drained(struct srn_qp *qp);

/* --- responder.c --- */
void srn_resp_reset(struct srn_qp *qp, uint32_t psn);
void srn_resp_handle(struct srn_qp *qp, const struct wire_packet *pkt);
void srn_resp_flush_acks(struct srn_nic *nic);
/* A SEND or WRITE packet whose turn it is. */
void srn_resp_execute(struct srn_qp *qp, const struct wire_packet *pkt);

/* --- uc.c --- */
void srn_uc_run(struct srn_qp *qp);
void srn_uc_handle(struct srn_qp *qp, const struct wire_packet *pkt);

/* --- ud.c --- */
void srn_ud_run(struct srn_qp *qp);
void srn_ud_handle(struct srn_qp *qp, const struct wire_packet *pkt, struct srn_peer from);

/* --- dispatch.c --- */
/* Work on what was posted. */
void srn_sq_run(struct srn_qp *qp);
/* A good packet from this address. */
void srn_receive(struct srn_nic *nic, const struct wire_packet *pkt, uint32_t src_ip);
/* The same, of one that was checked before. */
void srn_rx_datagram(struct srn_nic *nic, uint32_t src_ip, const uint8_t *data, size_t len);
/* A QP's link has time again. On the progress thread. */
void srn_resume(struct srn_nic *nic, uint32_t qpn);
/* The NIC works again: do what was left undone. On the progress thread. */
void srn_stall_over(struct srn_nic *nic);

/* --- progress.c: nic->lock not held --- */
int srn_net_open(struct srn_nic *nic, char *err, size_t err_len);
void srn_net_close(struct srn_nic *nic);
void srn_net_after_fork(struct srn_nic *nic);
/* The process ends with the NIC open: what is under way in the network arrives. */
void srn_net_at_exit(struct srn_nic *nic);

#endif
