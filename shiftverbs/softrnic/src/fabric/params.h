/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a network's links and switches are like, and how it is written down. Pure: reads the text it is given.
 *
 *   rail0:rate=10G,delay=5us,buffer=1M;rail1:rate=1G      a rail's ports
 *   *:rate=10G;b/rail0:rate=1G                            all rails; one host's port, from then on
 *   rail0:rate=40G,dcqcn=sigcomm15,dilation=500           congestion control; 500 times slower
 *   rail0:rate=40G,pfc=on,xoff=250K,watchdog=off          flow control: packets are not dropped, hosts are paused
 *   rail1:off                                             without limits again
 *
 * Entries are separated by ';' or line ends, '#' begins a comment, later entries win. Rates are bits per second, buffers
 * bytes, times have a unit (s, ms, us, ns); K, M and G are powers of 1000. pmax is in percent.
 */
#ifndef SOFTRNIC_FABRIC_PARAMS_H
#define SOFTRNIC_FABRIC_PARAMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fabric/dcqcn.h"

/* One port: the link between a host and its rail's switch, both ways, and the switch's queue towards the host. */
struct fabric_params {
    uint64_t rate;     /* bits per second of the link; 0 = no limits: packets do not pass the model at all */
    uint64_t delay_ns; /* propagation from a host to this one */
    uint64_t buffer;   /* bytes that may wait in the switch for this host */
    /* ECN: none is marked with up to kmin bytes in the queue, all of them above kmax, at kmax so many of 1; 0 = none */
    uint64_t kmin, kmax;
    double pmax;
    struct dcqcn_params dcqcn; /* of this host's NIC */
    /*
     * Priority flow control (IEEE 802.1Qbb) between the switch and this host, per priority: it is paused when so many bytes
     * of it are in the switch as xoff, and goes on at xon; what still comes after XOFF has the headroom. A pause of the
     * switch by the host that is longer than the watchdog's time is a storm; 0 = nobody watches.
     */
    bool pfc;
    uint64_t xoff, xon, headroom, watchdog_ns;
    uint32_t dilation; /* what all of the above is slowed down by already */
};

/* Where an entry applies. */
struct fabric_scope {
    char host[32]; /* "" = all hosts */
    int rail;      /* -1 = all rails */
};

#define FABRIC_DELAY_NS 1000
#define FABRIC_BUFFER 1000000
#define FABRIC_XON_BELOW 3000 /* XOFF; HPCC's switch (Li et al., SIGCOMM 2019) resumes so much below it */
#define FABRIC_WATCHDOG_NS 200000000 /* SONiC's detection time */

/*
 * The next entry of a text: 1 and *text behind it, 0 at its end, -1 with a sentence in err that names what is wrong.
 * What an entry does not name has its default.
 */
int fabric_parse(const char **text, struct fabric_scope *scope, struct fabric_params *params, char *err,
                 size_t err_len);

#endif
