/* SPDX-License-Identifier: BSD-3-Clause */
/* What a NIC counted, in words: written to stderr at its last close where SOFTRNIC_COUNTERS=1 asks for it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "objects/nic.h"
#include "objects/queues.h"

static const char *const names[SRN_CNT_RX_BAD] = {
    [SRN_CNT_TX_PACKETS] = "tx_packets",
    [SRN_CNT_RX_PACKETS] = "rx_packets",
    [SRN_CNT_TX_FILTERED] = "tx_lost_by_fault",
    [SRN_CNT_RX_FILTERED] = "rx_lost_by_fault",
    [SRN_CNT_TX_ERRORS] = "tx_errors",
    [SRN_CNT_RX_NO_QP] = "rx_no_qp",
    [SRN_CNT_RX_WRONG_PEER] = "rx_wrong_peer",
    [SRN_CNT_RX_WRONG_STATE] = "rx_wrong_state",
    [SRN_CNT_RX_UD_DROPPED] = "rx_ud_dropped",
    [SRN_CNT_RX_BAD_PKEY] = "rx_bad_pkey",
    [SRN_CNT_RX_BAD_QKEY] = "rx_bad_qkey",
    [SRN_CNT_DUPLICATES] = "duplicates",
    [SRN_CNT_SEQ_NAK_SENT] = "seq_nak_sent",
    [SRN_CNT_RNR_NAK_SENT] = "rnr_nak_sent",
    [SRN_CNT_SEQ_NAK_RECEIVED] = "seq_nak_received",
    [SRN_CNT_RNR_NAK_RECEIVED] = "rnr_nak_received",
    [SRN_CNT_TIMEOUTS] = "timeouts",
    [SRN_CNT_RETRANSMITS] = "retransmits",
};

/* One line: "softrnic: 1234 a/soft0 tx_packets=5 ...", without what is 0. */
void srn_counters_print(const struct srn_nic *nic) {
    const char *wanted = getenv("SOFTRNIC_COUNTERS");
    char line[1024];
    size_t used;

    if (!wanted || strcmp(wanted, "1"))
        return;
    used = (size_t)snprintf(line, sizeof(line), "softrnic: %d %s/%s", (int)getpid(), srn_global.config.host,
                            nic->dev->config->name);
    for (int i = 0; i < SRN_CNT_COUNT && used < sizeof(line); i++) {
        const char *name =
            i < SRN_CNT_RX_BAD ? names[i] : wire_error_name((enum wire_error)(i - SRN_CNT_RX_BAD));

        if (nic->counters[i])
            used += (size_t)snprintf(line + used, sizeof(line) - used, " %s%s=%" PRIu64,
                                     i < SRN_CNT_RX_BAD ? "" : "rx_bad_", name, nic->counters[i]);
    }
    fprintf(stderr, "%s\n", line);
}
