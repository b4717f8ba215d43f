/* SPDX-License-Identifier: BSD-3-Clause */
/* libFuzzer over config_parse(): the values of SOFTRNIC and SOFTRNIC_HOST, a zero byte between them. */
#include <stdlib.h>
#include <string.h>

#include "faults/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct config config;
    char err[96];
    char *softrnic = malloc(size + 1), *host;
    size_t first;

    if (!softrnic)
        return -1;
    if (size)
        memcpy(softrnic, data, size);
    softrnic[size] = 0;
    first = strlen(softrnic);
    host = first < size ? softrnic + first + 1 : NULL;
    if (config_parse(&config, softrnic, host, err, sizeof(err)) == 0) {
        if (config.device_count < 0 || config.device_count > CONFIG_MAX_DEVICES ||
            !config_valid_host(config.host))
            abort();
        for (int i = 0; i < config.device_count; i++) {
            const struct config_device *device = &config.devices[i];

            if (device->rail < 0 || device->rail >= CONFIG_MAX_DEVICES || device->kind < CONFIG_LOOPBACK ||
                device->kind > CONFIG_NULL || (i && device->rail <= device[-1].rail))
                abort();
            if (!device->name[0] || strnlen(device->name, CONFIG_DEVICE_LEN) == CONFIG_DEVICE_LEN ||
                strpbrk(device->name, "/; \t\n"))
                abort();
            for (int j = 0; j < i; j++)
                if (strcmp(device->name, config.devices[j].name) == 0)
                    abort();
        }
    } else if (!memchr(err, 0, sizeof(err)) || !err[0]) {
        abort();
    }
    free(softrnic);
    return 0;
}
