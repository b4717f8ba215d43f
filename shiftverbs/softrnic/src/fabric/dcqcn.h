/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * DCQCN (Zhu et al., Congestion Control for Large-Scale RDMA Deployments, SIGCOMM 2015), the ends' part: the receiver
 * answers marked packets with CNPs, the sender of a QP lowers its rate for them and raises it again by a timer and a
 * byte counter. Pure: the caller says what time it is. The switch's part, marking, is in port.h.
 */
#ifndef SOFTRNIC_FABRIC_DCQCN_H
#define SOFTRNIC_FABRIC_DCQCN_H

#include <stdbool.h>
#include <stdint.h>

struct dcqcn_params {
    double g;            /* weight of what is new in alpha; 0 = no congestion control */
    uint64_t cnp_ns;     /* between two CNPs of a QP, at least */
    uint64_t alpha_ns;   /* without a CNP for so long, alpha decays */
    uint64_t timer_ns;   /* period of the increase timer */
    uint64_t bytes;      /* period of the byte counter */
    uint32_t recoveries; /* F: steps of fast recovery before the target rate grows */
    double ai, hai;      /* additive and hyper increase, bits per second */
    double min_rate;     /* bits per second */
    bool clamp;          /* every decrease lowers the target rate, not only the first one after an increase */
};

/* The receiver's part of one QP (notification point). Zeroed: none was sent yet. */
struct dcqcn_np {
    uint64_t next_ns; /* no CNP before that */
};

/* The sender's part of one QP (reaction point). Zeroed: at line rate. */
struct dcqcn_rp {
    bool limited;
    double rate, target; /* bits per second */
    double alpha;
    uint64_t alpha_at, timer_at; /* ns */
    uint64_t bytes;              /* sent since the byte counter's last step */
    uint32_t timer_steps, byte_steps;
};

/* A marked packet came: is a CNP to be sent? */
bool dcqcn_handle_mark(struct dcqcn_np *np, const struct dcqcn_params *params, uint64_t now_ns);
/* A CNP came. line: what the link does, bits per second. */
void dcqcn_handle_cnp(struct dcqcn_rp *rp, const struct dcqcn_params *params, double line, uint64_t now_ns);
/*
 * A packet of so many bytes goes to the link. Returns when the rate lets another follow, ns, with the increases until
 * then; a CNP that comes meanwhile counts for the one after that.
 */
uint64_t dcqcn_sent(struct dcqcn_rp *rp, const struct dcqcn_params *params, double line, uint64_t now_ns,
                    uint32_t bytes);

#endif
