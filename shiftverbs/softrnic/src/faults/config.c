/* SPDX-License-Identifier: BSD-3-Clause */
#include "faults/config.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_HOST "a"
#define DEFAULT_DEVICES 2

int config_valid_host(const char *name) {
    size_t len = strlen(name);

    if (len == 0 || len >= CONFIG_NAME_LEN)
        return 0;
    for (const char *p = name; *p; p++)
        if (!isalnum((unsigned char)*p) && !strchr("-_.", *p))
            return 0;
    return 1;
}

/* A whole decimal number from min to max, or -1. */
static int parse_number(const char *text, int min, int max) {
    char *end;
    long value;

    if (!isdigit((unsigned char)*text))
        return -1;
    value = strtol(text, &end, 10);
    return *end == '\0' && value >= min && value <= max ? (int)value : -1;
}

static struct config_device *add_device(struct config *config, const char *name, int rail,
                                        enum config_kind kind) {
    struct config_device *device = &config->devices[config->device_count++];

    memset(device, 0, sizeof(*device));
    device->rail = rail;
    device->kind = kind;
    snprintf(device->name, sizeof(device->name), "%s", name);
    return device;
}

static bool all_digits(const char *text) {
    return *text && text[strspn(text, "0123456789")] == '\0';
}

/* What keeps this from being the name of a device, as the kernel would have it in /sys/class/infiniband; or NULL. */
static const char *bad_name(const char *name) {
    if (strlen(name) >= CONFIG_DEVICE_LEN)
        return "it is longer than 63 characters";
    for (const char *p = name; *p; p++)
        if (*p <= ' ' || *p > '~' || *p == '/')
            return "it has a character that is white space, '/' or not printable ASCII";
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return "it is a directory's";
    if (!*name || all_digits(name) || strcmp(name, "null") == 0 || strcmp(name, "loopback") == 0)
        return "write a name like mlx5_0";
    return NULL;
}

/* The rail of an entry: soft<N>'s is N, that of any other name is its place. -1 with a sentence in err. */
static int rail_of(const struct config *config, const char *name, char *err, size_t err_len) {
    int rail = config->device_count;
    const char *bad = bad_name(name);

    if (!bad && strncmp(name, "soft", 4) == 0 && all_digits(name + 4)) {
        rail = parse_number(name + 4, 0, CONFIG_MAX_DEVICES - 1);
        if (rail < 0)
            bad = "soft0 to soft15 are the devices of rails 0 to 15";
    }
    if (bad) {
        snprintf(err, err_len, "'%.80s' is no device name: %s", name, bad);
        return -1;
    }
    for (int i = 0; i < config->device_count; i++) {
        if (strcmp(config->devices[i].name, name) == 0) {
            snprintf(err, err_len, "device %s is described twice", name);
            return -1;
        }
        if (config->devices[i].rail == rail) {
            snprintf(err, err_len, "%s and %s are both on rail%d: soft<N> is on rail<N>, others in order",
                     config->devices[i].name, name, rail);
            return -1;
        }
    }
    if (config->device_count == CONFIG_MAX_DEVICES) {
        snprintf(err, err_len, "more than %d devices", CONFIG_MAX_DEVICES);
        return -1;
    }
    return rail;
}

/* "soft0@netdev:eth0", the text being ours to cut up. */
static int parse_entry(struct config *config, char *entry, char *err, size_t err_len) {
    char *what = strchr(entry, '@');
    struct config_device *device;
    char *address = NULL;
    struct in_addr in;
    int rail;

    if (what)
        *what++ = '\0';
    rail = rail_of(config, entry, err, err_len);
    if (rail < 0)
        return -1;
    device = add_device(config, entry, rail, CONFIG_LOOPBACK);
    if (!what || strcmp(what, "loopback") == 0)
        return 0;
    if (strcmp(what, "null") == 0) {
        device->kind = CONFIG_NULL;
        return 0;
    }
    if (strncmp(what, "netdev:", 7) == 0) {
        what += 7;
        address = strchr(what, '/');
        if (address)
            *address++ = '\0';
        if (*what == '\0' || strlen(what) >= sizeof(device->netdev)) {
            snprintf(err, err_len, "device %s: '%.80s' is no name of a network interface", device->name,
                     what);
            return -1;
        }
        device->kind = CONFIG_NETDEV;
        strcpy(device->netdev, what);
    } else {
        device->kind = CONFIG_ADDRESS;
        address = what;
    }
    if (address) {
        if (inet_pton(AF_INET, address, &in) != 1 || in.s_addr == INADDR_ANY) {
            snprintf(err, err_len,
                     "device %s: '%.80s' is neither an IPv4 address nor netdev:NAME, loopback or null",
                     device->name, address);
            return -1;
        }
        device->address = in.s_addr;
    }
    return 0;
}

static int by_rail(const void *a, const void *b) {
    return ((const struct config_device *)a)->rail - ((const struct config_device *)b)->rail;
}

static int parse_entries(struct config *config, const char *text, char *err, size_t err_len) {
    char copy[4096];
    char *rest = copy, *entry;

    if (strlen(text) >= sizeof(copy)) {
        snprintf(err, err_len, "longer than %zu characters", sizeof(copy) - 1);
        return -1;
    }
    strcpy(copy, text);
    while ((entry = strsep(&rest, ";"))) {
        /* An empty last entry is a trailing semicolon. */
        if (*entry == '\0' && !rest && config->device_count)
            break;
        if (parse_entry(config, entry, err, err_len) != 0)
            return -1;
    }
    qsort(config->devices, (size_t)config->device_count, sizeof(config->devices[0]), by_rail);
    return 0;
}

/*
 * Is this a list of devices, right or wrong? A single word is, where it looks like a name of one: "on" or a misspelt
 * "nul" is none.
 */
static bool is_list(const char *text) {
    size_t len = strlen(text);

    if (strpbrk(text, ";@"))
        return true;
    return isalpha((unsigned char)text[0]) && isdigit((unsigned char)text[len - 1]) && !strchr(text, ':');
}

int config_parse(struct config *config, const char *softrnic, const char *host, char *err, size_t err_len) {
    char why[256] = "";
    int count = -1;
    enum config_kind kind = CONFIG_LOOPBACK;

    memset(config, 0, sizeof(*config));
    if (!host || !*host)
        host = DEFAULT_HOST;
    if (!config_valid_host(host)) {
        snprintf(err, err_len, "SOFTRNIC_HOST=%.80s: a host is 1 to %d letters, digits, '-', '_' or '.'",
                 host, CONFIG_NAME_LEN - 1);
        return -1;
    }
    strcpy(config->host, host);
    if (!softrnic || !*softrnic || strcmp(softrnic, "0") == 0)
        return 0;

    if (strcmp(softrnic, "1") == 0) {
        count = DEFAULT_DEVICES;
    } else if (strcmp(softrnic, "null") == 0) {
        count = DEFAULT_DEVICES;
        kind = CONFIG_NULL;
    } else if (strncmp(softrnic, "null:", 5) == 0) {
        count = parse_number(softrnic + 5, 1, CONFIG_MAX_DEVICES);
        kind = CONFIG_NULL;
    } else {
        count = parse_number(softrnic, 1, CONFIG_MAX_DEVICES);
    }
    if (count > 0) {
        for (int rail = 0; rail < count; rail++) {
            char name[CONFIG_DEVICE_LEN];

            snprintf(name, sizeof(name), "soft%d", rail);
            add_device(config, name, rail, kind);
        }
        return 0;
    }
    if (is_list(softrnic)) {
        if (parse_entries(config, softrnic, why, sizeof(why)) == 0)
            return 0;
        snprintf(err, err_len, "SOFTRNIC=%.200s: %s", softrnic, why);
    } else {
        snprintf(err, err_len,
                 "SOFTRNIC=%.200s: expected 0, 1 (two devices), a number of devices up to %d, null, null:N, "
                 "names like "
                 "mlx5_0;mlx5_1, or a description like soft0@netdev:eth0;soft1@127.0.0.5",
                 softrnic, CONFIG_MAX_DEVICES);
    }
    config->device_count = 0;
    return -1;
}

int config_parse_keys(struct config *config, const char *keys, char *err, size_t err_len) {
    config->reuse_keys = keys && strcmp(keys, "reuse") == 0;
    if (!keys || !*keys || config->reuse_keys)
        return 0;
    snprintf(err, err_len, "SOFTRNIC_KEYS=%.80s: expected reuse, or nothing", keys);
    config->device_count = 0;
    return -1;
}

int config_load(struct config *config) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    char err[600];

    if (config_parse(config, getenv("SOFTRNIC"), getenv("SOFTRNIC_HOST"), err, sizeof(err)) == 0 &&
        config_parse_keys(config, getenv("SOFTRNIC_KEYS"), err, sizeof(err)) == 0)
        return 0;
    if (!atomic_flag_test_and_set(&said))
        fprintf(stderr, "softrnic: %s; no devices\n", err);
    return -1;
}
