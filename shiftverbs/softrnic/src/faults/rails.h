/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The rails' fabric as all processes share it: what fabric/port.h computes, in the registry's file. A port has a lock of
 * its own, for no longer than that takes. What is asked here concerns a device whose fault_filter() says FAULT_CARRY.
 */
#ifndef SOFTRNIC_RAILS_H
#define SOFTRNIC_RAILS_H

#include "fabric/port.h"
#include "fabric/switch.h"
#include "faults/counted.h"
#include "faults/fault.h"

/* Has any port of the device's rail limits? */
bool rails_limited(const struct fault_port *port);

/* What this host's port is like now; rate 0 = it has no limits. */
struct fabric_params rails_params(const struct fault_port *port);

/* The host's NIC counts one more. */
void rails_count(const struct fault_port *port, enum nic_counter counter);

/* When the last bit of a packet of len bytes of UDP payload, sent now by this device's host, is in the switch. */
uint64_t rails_send(const struct fault_port *port, uint64_t now_ns, size_t len);

/* It is there, on its way to this address; ect: ECN may mark it. fate.out_ns is when it arrives there. */
struct fabric_fate rails_forward(const struct fault_port *port, uint32_t peer_ip, uint64_t now_ns, size_t len,
                                 bool ect);

/*
 * Where any port of the rail has flow control, its switch has all packets (fabric/switch.h), and it is asked what became
 * of them. That goes on for those that it has when flow control is switched off.
 */
bool rails_switched(const struct fault_port *port);
/* A packet for this device's link. A ticket without life: there is no room, it is lost. */
struct fabric_ticket rails_give(const struct fault_port *port, uint32_t peer_ip, unsigned priority,
                                size_t len, bool ect, uint64_t now_ns);
/* Where it is; news.at_ns of one that is out is when it arrives. */
struct fabric_news rails_ask(const struct fault_port *port, uint32_t peer_ip, struct fabric_ticket ticket,
                             uint64_t now_ns);
void rails_forget(const struct fault_port *port, struct fabric_ticket ticket);
/* When the link will have sent what waits for it, in this priority and above. */
uint64_t rails_link_free(const struct fault_port *port, unsigned priority, uint64_t now_ns);

#endif
