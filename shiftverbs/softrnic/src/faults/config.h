/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What SOFTRNIC, SOFTRNIC_HOST and SOFTRNIC_KEYS ask for. Pure: reads the strings it is given.
 *
 *   unset, "" or "0"      no devices
 *   "N" (1 to 16)         loopback devices soft0 .. soft<N-1>; "1" is the default: two, on two rails
 *   "null", "null:N"      two (N) devices that complete everything at once without a network
 *   "mlx5_0;mlx5_1"       loopback devices of these names, in this order on rails 0, 1, ...
 *   "soft0@netdev:eth0;soft1@127.0.0.5;mlx5_2@loopback;mlx5_3@null"
 *                         one entry per device; netdev:NAME/ADDRESS picks one of several addresses
 * A device soft<N> is on rail<N> wherever it stands, one of another name on the rail of its place.
 */
#ifndef SOFTRNIC_CONFIG_H
#define SOFTRNIC_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CONFIG_MAX_DEVICES 16 /* rails are 0 .. 15 */
#define CONFIG_NAME_LEN 32
#define CONFIG_DEVICE_LEN 64 /* IBV_SYSFS_NAME_MAX */

enum config_kind {
    CONFIG_LOOPBACK = 1, /* an address of its own per process: see fault_claim() */
    CONFIG_ADDRESS,      /* a fixed IPv4 address */
    CONFIG_NETDEV,       /* the address of a network interface, whose carrier it follows */
    CONFIG_NULL,         /* no network */
};

struct config_device {
    char name[CONFIG_DEVICE_LEN];
    int rail;
    enum config_kind kind;
    char netdev[CONFIG_NAME_LEN]; /* CONFIG_NETDEV */
    uint32_t address;             /* CONFIG_ADDRESS; CONFIG_NETDEV if given, else 0; network order */
};

struct config {
    char host[CONFIG_NAME_LEN];
    int device_count;
    struct config_device devices[CONFIG_MAX_DEVICES]; /* in order of rail */
    bool reuse_keys; /* the key of what was deregistered last is the next registration's */
};

/*
 * Parse. softrnic may be NULL; host NULL or "" means "a". Returns 0, or -1 with a sentence in err that names
 * the value that is wrong; then there are no devices.
 */
int config_parse(struct config *config, const char *softrnic, const char *host, char *err, size_t err_len);

/* The memory keys, after config_parse: keys may be NULL or "" (a new value each time), or "reuse". As there. */
int config_parse_keys(struct config *config, const char *keys, char *err, size_t err_len);

/*
 * Both from the environment. An error is written to stderr once per process ("softrnic: ...") and leaves
 * device_count 0: a wrong value offers no devices, it never crashes the program.
 */
int config_load(struct config *config);

/* 1 if name can be a host: 1 to 31 letters, digits, '-', '_' or '.'. */
int config_valid_host(const char *name);

#endif
