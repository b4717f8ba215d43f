/* SPDX-License-Identifier: BSD-3-Clause */
/* What the network is like: SOFTRNIC_FABRIC, a file that it names, and what the command line asks for. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fabric/params.h"
#include "faults/registry.h"

#define MAX_TEXT 16384

/* The environment's text, from the file if it begins as a path does. NULL with a sentence in err and errno set. */
static const char *environment(char *buffer, size_t size, char *err, size_t err_len) {
    const char *value = getenv("SOFTRNIC_FABRIC");
    ssize_t n;
    int fd;

    if (!value || (*value != '/' && *value != '.'))
        return value ? value : "";
    fd = open(value, O_RDONLY | O_CLOEXEC);
    n = fd < 0 ? -1 : read(fd, buffer, size);
    if (n < 0 || (size_t)n == size) {
        int error = n < 0 ? errno : EFBIG;

        snprintf(err, err_len, "SOFTRNIC_FABRIC=%.200s: %s", value, strerror(error));
        if (fd >= 0)
            close(fd);
        errno = error;
        return NULL;
    }
    close(fd);
    buffer[n] = '\0';
    return buffer;
}

/* FNV-1a; never 0. */
static uint64_t hash(const char *text) {
    uint64_t value = 0xcbf29ce484222325u;

    for (; *text; text++)
        value = (value ^ (unsigned char)*text) * 0x100000001b3u;
    return value ? value : 1;
}

static int host_of(struct registry *reg, const char *name, bool make, char *err, size_t err_len) {
    struct config config = {0};
    int host = registry_find_host(reg, name);

    if (host >= 0)
        return host;
    if (!config_valid_host(name)) {
        snprintf(err, err_len, "fabric: '%s' cannot be a host's name", name);
        return -EINVAL;
    }
    if (!make) {
        snprintf(err, err_len, "fabric: unknown host '%s'; register makes it known", name);
        return -EINVAL;
    }
    snprintf(config.host, sizeof(config.host), "%s", name);
    host = registry_add_host(reg, &config);
    if (host < 0)
        snprintf(err, err_len, "fabric: host %s: there are %d hosts already", name, FAULT_MAX_HOSTS);
    return host < 0 ? -ENOSPC : host;
}

/* Those of the rails that somebody has devices on, or of the one that is named: while it can still be refused. */
static int make_switches(struct registry *reg, int rail, char *err, size_t err_len) {
    uint32_t rails = rail < 0 ? 0 : 1u << rail;

    for (unsigned host = 0; rail < 0 && host < reg->file->host_count; host++)
        rails |= reg->file->hosts[host].rails;
    for (unsigned r = 0; r < FAULT_MAX_RAILS; r++) {
        struct registry_switch *shared = rails >> r & 1 ? registry_switch_lock(reg, r, true) : NULL;

        if (shared) {
            registry_switch_unlock(shared);
        } else if (rails >> r & 1) {
            snprintf(err, err_len, "fabric: rail%u: a switch with flow control in %s: %s", r, reg->dir,
                     strerror(errno));
            return -1;
        }
    }
    return 0;
}

int network_apply(struct registry *reg, const char *text, bool make_hosts, char *err, size_t err_len) {
    /* All of it is read before any of it is in force. */
    for (int pass = 0; pass < 2; pass++) {
        const char *rest = text;
        struct fabric_scope scope;
        struct fabric_params params;
        int rc;

        while ((rc = fabric_parse(&rest, &scope, &params, err, err_len)) > 0) {
            int host = *scope.host ? host_of(reg, scope.host, make_hosts, err, err_len) : -1;

            if (host < -1)
                return host;
            if (!pass && params.pfc && make_switches(reg, scope.rail, err, err_len) != 0)
                return -EIO;
            if (pass)
                registry_set_fabric(reg, host, scope.rail, &params);
        }
        if (rc < 0)
            return -EINVAL;
    }
    return 0;
}

int network_from_environment(struct registry *reg, char *err, size_t err_len) {
    char buffer[MAX_TEXT];
    const char *text = environment(buffer, sizeof(buffer), err, err_len);
    int rc;

    if (!text)
        return -errno;
    if (!*text)
        return 0;
    registry_lock(reg);
    rc = hash(text) == reg->file->fabric_text ? 0 : network_apply(reg, text, true, err, err_len);
    if (rc == 0)
        reg->file->fabric_text = hash(text);
    registry_unlock(reg);
    return rc;
}
