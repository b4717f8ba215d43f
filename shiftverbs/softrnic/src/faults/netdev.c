/* SPDX-License-Identifier: BSD-3-Clause */
#include "faults/netdev.h"

#include <errno.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

/* Administratively up, and the cable in: what ip link shows as UP and LOWER_UP. */
static bool flags_up(unsigned flags) {
    return (flags & IFF_UP) && (flags & IFF_RUNNING);
}

/* The state now, past netlink. False for an interface that is gone. */
static bool ask(const struct netdev *netdev) {
    struct ifreq request = {0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool up;

    if (fd < 0)
        return false;
    memcpy(request.ifr_name, netdev->name, sizeof(request.ifr_name));
    up = ioctl(fd, SIOCGIFFLAGS, &request) == 0 && flags_up((unsigned short)request.ifr_flags);
    close(fd);
    return up;
}

int netdev_open(struct netdev *netdev, const char *name, bool *up) {
    struct sockaddr_nl at = {.nl_family = AF_NETLINK, .nl_groups = RTMGRP_LINK};

    if (strlen(name) >= sizeof(netdev->name))
        return -ENODEV;
    strcpy(netdev->name, name);
    netdev->index = (int)if_nametoindex(name);
    if (netdev->index == 0)
        return -ENODEV;
    netdev->fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_ROUTE);
    if (netdev->fd < 0)
        return -errno;
    if (bind(netdev->fd, (struct sockaddr *)&at, sizeof(at)) != 0) {
        int saved = errno;

        netdev_close(netdev);
        return -saved;
    }
    /* After the subscription, so that no change falls in between. */
    *up = ask(netdev);
    return 0;
}

static int add_change(bool now, bool *up, bool *states, int count, int max) {
    if (now == *up)
        return count;
    *up = now;
    if (count < max)
        states[count++] = now;
    else if (count)
        states[count - 1] = now;
    return count;
}

int netdev_poll(struct netdev *netdev, bool *up, bool *states, int max) {
    _Alignas(struct nlmsghdr) char buffer[16384];
    int count = 0;

    for (;;) {
        ssize_t n = recv(netdev->fd, buffer, sizeof(buffer), MSG_DONTWAIT);
        unsigned left;

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == ENOBUFS) { /* messages were lost: look for ourselves */
            count = add_change(ask(netdev), up, states, count, max);
            continue;
        }
        if (n <= 0)
            return count;
        left = (unsigned)n;
        for (struct nlmsghdr *msg = (struct nlmsghdr *)buffer; NLMSG_OK(msg, left);
             msg = NLMSG_NEXT(msg, left)) {
            const struct ifinfomsg *info = NLMSG_DATA(msg);

            if ((msg->nlmsg_type != RTM_NEWLINK && msg->nlmsg_type != RTM_DELLINK) ||
                msg->nlmsg_len < NLMSG_LENGTH(sizeof(*info)) || info->ifi_index != netdev->index)
                continue;
            count = add_change(msg->nlmsg_type == RTM_NEWLINK && flags_up(info->ifi_flags), up, states, count,
                               max);
        }
    }
}

void netdev_close(struct netdev *netdev) {
    if (netdev->fd >= 0)
        close(netdev->fd);
    netdev->fd = -1;
}
