/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Plain UDP between two connected sockets, as fast as the kernel lets it: as many datagrams a system call as the software
 * NIC has, or (GSO, GRO) as many a pass through the kernel's stack as fit in one. For udp_host.py, by ctypes.
 */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

#define BATCH 32         /* the software NIC's */
#define MOST_BYTES 61440 /* in one go of GSO */
#define LARGEST 8192     /* of one datagram */

static uint8_t data[BATCH][1 << 16];
static struct iovec iov[BATCH];
static struct mmsghdr msg[BATCH];

static double now_s(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void prepare(int count, size_t bytes) {
    memset(msg, 0, sizeof(msg));
    for (int i = 0; i < count; i++) {
        iov[i] = (struct iovec){data[i], bytes};
        msg[i].msg_hdr.msg_iov = &iov[i];
        msg[i].msg_hdr.msg_iovlen = 1;
    }
}

/* Waits, as the socket's timeout has it, for any datagram of the other side; whether one came. */
static bool credit(int fd) {
    char any[16];

    return recv(fd, any, sizeof(any), 0) >= 0;
}

/*
 * Send count datagrams. After each window of them wait for the receiver, so that few are lost. gso: MOST_BYTES of them in a
 * call, and once through the stack. 0, or an errno.
 */
int udp_send(int fd, uint32_t bytes, uint32_t count, uint32_t window, int gso) {
    uint32_t per_call = gso ? MOST_BYTES / bytes : BATCH;
    uint32_t since = 0;
    int segment = gso ? (int)bytes : 0;

    if (bytes > LARGEST || !bytes)
        return EINVAL;
    if (setsockopt(fd, IPPROTO_UDP, UDP_SEGMENT, &segment, sizeof(segment)) && gso)
        return errno;
    prepare(BATCH, bytes);
    for (uint32_t sent = 0; sent < count;) {
        uint32_t n = count - sent < per_call ? count - sent : per_call;

        if (gso) {
            if (send(fd, data, (size_t)n * bytes, 0) < 0 && errno != ECONNREFUSED)
                return errno;
        } else {
            int done = sendmmsg(fd, msg, n, 0);

            if (done < 0 && errno != ECONNREFUSED)
                return errno;
            if (done > 0)
                n = (uint32_t)done;
        }
        sent += n;
        since += n;
        /* The first window is ahead of what the receiver has confirmed. */
        if (sent > window && since >= window) {
            since -= window;
            (void)credit(fd);
        }
    }
    return 0;
}

/* Set a receiving socket up for it. 0, or an errno. */
int udp_gro(int fd, int on) {
    return setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof(on)) ? errno : 0;
}

/* How many datagrams of that size are in a message; 0: it is another. */
static uint32_t datagrams(const struct mmsghdr *m, uint32_t bytes) {
    return m->msg_len % bytes ? 0 : m->msg_len / bytes;
}

/*
 * Take what comes until a datagram of another size says that this was all; *mb_s is what the datagrams made, from the first
 * to the last that was counted, in 2^20 bytes a second. Answers each window with a datagram. 0, or an errno.
 */
int udp_receive(int fd, uint32_t bytes, uint32_t window, double *mb_s) {
    uint64_t got = 0, said = 0;
    double start = 0, last = 0;

    prepare(BATCH, sizeof(data[0]));
    for (;;) {
        int n = recvmmsg(fd, msg, BATCH, MSG_WAITFORONE, NULL);

        if (n < 0)
            return errno;
        for (int i = 0; i < n; i++) {
            uint32_t more = datagrams(&msg[i], bytes);

            if (!more && got) {
                *mb_s = (double)got * bytes / (last - start > 1e-9 ? last - start : 1e-9) / (1 << 20);
                return send(fd, "end", 3, 0) < 0 ? errno : 0;
            }
            if (more && !got)
                start = now_s();
            got += more;
        }
        last = now_s();
        for (; got - said >= window; said += window)
            (void)send(fd, "on", 2, MSG_DONTWAIT);
    }
}
