/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A process that has devices open, without a NIC behind them: drives the fault registry from commands on
 * standard input, one answer line per command. Devices and host come from SOFTRNIC and SOFTRNIC_HOST.
 *
 *   claim DEVICE [ADDRESS]            "address 127.32.1.1 slot 1 link up" | "error CODE: sentence"
 *   busy N                            the next N bind attempts find the address taken
 *   release DEVICE
 *   filter DEVICE tx|rx OPCODE [SYNDROME MSN QPN PEER]    "pass" | "drop"
 *   repeat N DEVICE ...               the same N times: "drops K of N, first at I"
 *   wait DEVICE                       wait until notify_fd is readable: "readable" | "silence" (after 5 s)
 *   events DEVICE                     "events port_err port_active ..."
 *   state DEVICE                      "link up alive 1"
 *   fork DEVICE                       fork; the child drops the port, says "child ..." and ends
 *   parse SOFTRNIC HOST               "devices soft0:loopback ..." | "error sentence"
 */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "faults/fault.h"

static struct config config;
static struct fault_port *ports[CONFIG_MAX_DEVICES];
static int busy;

static int bind_fn(void *arg, uint32_t address) {
    (void)arg, (void)address;
    return busy > 0 && busy-- ? -EADDRINUSE : 0;
}

static struct config_device *find_device(const char *name) {
    for (int i = 0; name && i < config.device_count; i++)
        if (strcmp(config.devices[i].name, name) == 0)
            return &config.devices[i];
    return NULL;
}

static void claim(const struct config_device *device, const char *address) {
    char err[400] = "", text[INET_ADDRSTRLEN];
    struct fault_port **port = &ports[device->rail];
    int rc = fault_claim(port, &config, device, address ? inet_addr(address) : device->address, bind_fn, NULL,
                         err, sizeof(err));

    if (rc) {
        printf("error %d: %s\n", -rc, err);
        return;
    }
    inet_ntop(AF_INET, &(*port)->address, text, sizeof(text));
    printf("address %s slot %d link %s\n", text, (*port)->slot, fault_link_is_up(*port) ? "up" : "down");
}

static enum fault_verdict filter(struct fault_port *port, char **words, int count) {
    struct wire_packet pkt = {0};
    uint32_t delay_us;

    pkt.bth.opcode = (uint8_t)strtoul(words[1], NULL, 0);
    pkt.flags = wire_opcode_flags(pkt.bth.opcode);
    pkt.aeth.syndrome = count > 2 ? (uint8_t)strtoul(words[2], NULL, 0) : 0;
    pkt.aeth.msn = count > 3 ? (uint32_t)strtoul(words[3], NULL, 0) : 0;
    return fault_filter(port, words[0][0] == 't' ? FAULT_TX : FAULT_RX, &pkt,
                        count > 4 ? (uint32_t)strtoul(words[4], NULL, 0) : 0,
                        count > 5 ? inet_addr(words[5]) : 0, &delay_us);
}

static void repeat(struct fault_port *port, int times, char **words, int count) {
    int drops = 0, first = 0;

    for (int i = 1; i <= times; i++) {
        if (filter(port, words, count) == FAULT_DROP) {
            drops++;
            if (!first)
                first = i;
        }
    }
    printf("drops %d of %d, first at %d\n", drops, times, first);
}

static void wait_readable(const struct fault_port *port) {
    struct pollfd fd = {.fd = port->notify_fd, .events = POLLIN};

    puts(poll(&fd, 1, 5000) == 1 ? "readable" : "silence");
}

static void print_events(struct fault_port *port) {
    static const char *const names[] = {"", "port_err", "port_active", "device_fatal"};
    enum fault_event events[8];
    int n = fault_handle_notify(port, events, 8);

    printf("events");
    for (int i = 0; i < n; i++)
        printf(" %s", names[events[i]]);
    puts("");
}

static void do_fork(int rail) {
    pid_t pid;

    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        fault_after_fork(ports[rail]);
        ports[rail] = NULL;
        puts("child has dropped it");
        fflush(stdout);
        exit(0);
    }
    waitpid(pid, NULL, 0);
}

static void parse(const char *softrnic, const char *host) {
    static const char *const kinds[] = {"", "loopback", "address", "netdev", "null"};
    struct config parsed;
    char err[400] = "";

    if (config_parse(&parsed, softrnic, host, err, sizeof(err)) != 0) {
        printf("error %s\n", err);
        return;
    }
    printf("host %s devices", parsed.host);
    for (int i = 0; i < parsed.device_count; i++) {
        const struct config_device *device = &parsed.devices[i];
        char text[INET_ADDRSTRLEN];

        printf(" %s:%s", device->name, kinds[device->kind]);
        if (device->netdev[0])
            printf(":%s", device->netdev);
        if (device->address)
            printf("/%s", inet_ntop(AF_INET, &device->address, text, sizeof(text)));
    }
    puts("");
}

static void run(char **words, int count) {
    const char *command = words[0];
    struct config_device *device;

    if (strcmp(command, "parse") == 0) {
        parse(count > 1 ? words[1] : "", count > 2 ? words[2] : NULL);
        return;
    }
    if (strcmp(command, "busy") == 0) {
        busy = atoi(words[1]);
        puts("ok");
        return;
    }
    if (strcmp(command, "repeat") == 0) {
        device = find_device(words[2]);
        repeat(ports[device->rail], atoi(words[1]), words + 3, count - 3);
        return;
    }
    device = find_device(count > 1 ? words[1] : NULL);
    if (!device) {
        puts("error no such device");
        return;
    }
    if (strcmp(command, "claim") == 0) {
        claim(device, count > 2 ? words[2] : NULL);
    } else if (strcmp(command, "release") == 0) {
        fault_release(ports[device->rail]);
        ports[device->rail] = NULL;
        puts("released");
    } else if (strcmp(command, "filter") == 0) {
        puts(filter(ports[device->rail], words + 2, count - 2) == FAULT_DROP ? "drop" : "pass");
    } else if (strcmp(command, "wait") == 0) {
        wait_readable(ports[device->rail]);
    } else if (strcmp(command, "events") == 0) {
        print_events(ports[device->rail]);
    } else if (strcmp(command, "state") == 0) {
        printf("link %s alive %d\n", fault_link_is_up(ports[device->rail]) ? "up" : "down",
               !fault_is_dead(ports[device->rail]));
    } else if (strcmp(command, "fork") == 0) {
        do_fork(device->rail);
    } else {
        puts("error no such command");
    }
}

int main(void) {
    char line[2000], *words[16];

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (config_load(&config) != 0)
        return 3;
    printf("ready %s %d\n", config.host, config.device_count);
    while (fgets(line, sizeof(line), stdin)) {
        int count = 0;

        for (char *word = strtok(line, " \n"); word && count < 16; word = strtok(NULL, " \n"))
            words[count++] = word;
        if (count)
            run(words, count);
    }
    for (int i = 0; i < CONFIG_MAX_DEVICES; i++)
        if (ports[i])
            fault_release(ports[i]);
    return 0;
}
