/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * libFuzzer over wire_parse(): any bytes, with and without the ICRC check. What is accepted is packed again and must
 * come out as it went in.
 */
#include <stdlib.h>
#include <string.h>

#include "wire/wire.h"

#define MUST(condition)                                                                                      \
    do {                                                                                                     \
        if (!(condition))                                                                                    \
            abort();                                                                                         \
    } while (0)

static void pack_again(struct wire_packet *pkt, const struct wire_flow *flow) {
    uint8_t datagram[WIRE_MAX_HDR_LEN + 65536 + WIRE_MAX_TAIL_LEN];
    struct iovec iov = {(void *)(uintptr_t)pkt->payload, pkt->payload_len};
    struct wire_packet packed = *pkt, parsed;
    size_t len = wire_pack_headers(datagram, &packed, pkt->payload_len);

    MUST(len > 0 && len <= WIRE_MAX_HDR_LEN && packed.bth.pad == pkt->bth.pad);
    if (pkt->payload_len)
        memcpy(datagram + len, pkt->payload, pkt->payload_len);
    {
        uint8_t tail[WIRE_MAX_TAIL_LEN];
        size_t tail_len = wire_seal(tail, flow, datagram, len, &iov, pkt->payload_len ? 1 : 0);

        MUST(tail_len <= WIRE_MAX_TAIL_LEN);
        len += pkt->payload_len;
        memcpy(datagram + len, tail, tail_len);
        len += tail_len;
    }
    MUST(wire_parse(&parsed, flow, datagram, len) == WIRE_OK);
    MUST(parsed.flags == pkt->flags && parsed.payload_len == pkt->payload_len);
    MUST(parsed.bth.opcode == pkt->bth.opcode && parsed.bth.pkey == pkt->bth.pkey);
    MUST(parsed.bth.dest_qpn == pkt->bth.dest_qpn && parsed.bth.psn == pkt->bth.psn);
    MUST(parsed.bth.ack_req == pkt->bth.ack_req && parsed.bth.solicited == pkt->bth.solicited);
    if (pkt->flags & WIRE_F_AETH)
        MUST(parsed.aeth.syndrome == pkt->aeth.syndrome && parsed.aeth.msn == pkt->aeth.msn);
    MUST(!pkt->payload_len || memcmp(parsed.payload, pkt->payload, pkt->payload_len) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct wire_packet pkt;
    struct wire_flow flow;

    wire_flow_init(&flow, 0x0100007f, 0xb712, 0x0200007f, 0xb712);
    if (size > 65000)
        return -1;
    MUST(wire_error_name(wire_parse(&pkt, &flow, data, size)) != NULL);
    flow.any_id = true;
    (void)wire_parse(&pkt, &flow, data, size);
    flow.any_id = false;
    if (wire_parse(&pkt, NULL, data, size) == WIRE_OK) {
        MUST(!pkt.payload_len || (pkt.payload >= data && pkt.payload + pkt.payload_len <= data + size));
        pack_again(&pkt, &flow);
    }
    return 0;
}
