/* SPDX-License-Identifier: BSD-3-Clause */
/* Whether a network interface has its carrier: asked once, then told by the kernel through netlink. */
#ifndef SOFTRNIC_NETDEV_H
#define SOFTRNIC_NETDEV_H

#include <net/if.h>
#include <stdbool.h>

struct netdev {
    int fd; /* readable when netdev_poll() has something to read */
    int index;
    char name[IF_NAMESIZE];
};

/* Start to watch. 0 and the present state in *up, or -errno (ENODEV: there is no such interface). */
int netdev_open(struct netdev *netdev, const char *name, bool *up);

/*
 * Read what the kernel told: fills states[] with each change to up (true) or down in order, *up being what was known
 * before and what is known afterwards. Returns the number of changes, at most max; further ones are folded into the
 * last so that it is what holds now.
 */
int netdev_poll(struct netdev *netdev, bool *up, bool *states, int max);

void netdev_close(struct netdev *netdev);

#endif
