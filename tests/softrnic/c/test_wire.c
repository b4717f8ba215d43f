/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Unit tests of the wire format. Without arguments: known answers, malformed packets and seeded damage. With
 * "vectors": read lines from standard input, each one datagram made by an independent encoder, and check that
 * it is parsed to the fields given and packed to the same bytes.
 */
#include <arpa/inet.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire/wire.h"

static int checks, failures;

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        checks++;                                                                                            \
        if (!(condition)) {                                                                                  \
            failures++;                                                                                      \
            fprintf(stderr, "%s:%d: not true: %s\n", __func__, __LINE__, #condition);                        \
        }                                                                                                    \
    } while (0)

static unsigned random_state;

static unsigned next_random(void) {
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

static void flip_bit(uint8_t *data, size_t bit) {
    data[bit / 8] ^= (uint8_t)(1u << bit % 8);
}

static size_t unhex(uint8_t *out, size_t max, const char *hex) {
    size_t n = 0;
    unsigned byte;

    for (; n < max && sscanf(hex, "%2x", &byte) == 1; hex += 2)
        out[n++] = (uint8_t)byte;
    return n;
}

static struct wire_flow flow_between(const char *src, uint16_t src_port, const char *dst, uint16_t dst_port) {
    struct wire_flow flow;

    wire_flow_init(&flow, inet_addr(src), htons(src_port), inet_addr(dst), htons(dst_port));
    return flow;
}

/* A heap copy of exactly this length, so that the sanitizer sees a read beyond it. */
static enum wire_error parse_exact(struct wire_packet *pkt, const struct wire_flow *flow, const uint8_t *data,
                                   size_t len) {
    uint8_t *copy = malloc(len ? len : 1);
    enum wire_error rc;

    if (len)
        memcpy(copy, data, len);
    rc = wire_parse(pkt, flow, copy, len);
    pkt->payload = NULL;
    free(copy);
    return rc;
}

static size_t make_datagram(uint8_t *out, struct wire_packet *pkt, const struct wire_flow *flow,
                            const uint8_t *payload, size_t payload_len) {
    struct iovec iov = {(void *)(uintptr_t)payload, payload_len};
    size_t len = wire_pack_headers(out, pkt, payload_len);
    uint8_t tail[WIRE_MAX_TAIL_LEN];
    size_t tail_len = wire_seal(tail, flow, out, len, &iov, 1);

    if (payload_len)
        memcpy(out + len, payload, payload_len);
    len += payload_len;
    memcpy(out + len, tail, tail_len);
    return len + tail_len;
}

/* The check value of CRC-32/ISO-HDLC, and equality of every path through the code (bytes, words, folding). */
static void test_crc32(void) {
    uint8_t data[1500];

    CHECK((uint32_t)~wire_crc32(0xffffffff, "123456789", 9) == 0xcbf43926);
    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)(i * 167 + (i >> 3));
    for (size_t len = 0; len < sizeof(data); len += len < 300 ? 1 : 37) {
        uint32_t by_bytes = 0xffffffff;

        for (size_t i = 0; i < len; i++)
            by_bytes = wire_crc32(by_bytes, data + i, 1);
        CHECK(by_bytes == wire_crc32(0xffffffff, data, len));
        if (len > 5)
            CHECK(wire_crc32(wire_crc32(7, data + 3, 2), data + 5, len - 5) ==
                  wire_crc32(7, data + 3, len - 3));
    }
}

/* Packets that real adapters put on a wire. */
static void test_icrc_known_answers(void) {
    struct wire_flow flow;
    struct wire_seal_state state;
    uint8_t hdr[64], payload[64], tail[WIRE_MAX_TAIL_LEN];
    size_t hdr_len, len;

    /* A UC SEND ONLY with 18 bytes of payload and 2 of padding. */
    flow = flow_between("192.168.0.7", 49152, "192.168.0.7", 4791);
    flow.ip_id = 1144;
    hdr_len = unhex(hdr, sizeof(hdr), "2460ffff000000d300cf1710");
    len = unhex(payload, sizeof(payload), "4630818be28935d90e9a95505401be885e50");
    CHECK(hdr_len == 12 && len == 18);
    wire_seal_start(&state, &flow, hdr, hdr_len, len);
    wire_seal_feed(&state, payload, len);
    CHECK(wire_seal_finish(&state, tail) == 6);
    CHECK(memcmp(tail, "\0\0\x78\xf3\x53\xf3", 6) == 0);

    /* A congestion notification captured on a ConnectX-4 Lx: BECN set, TOS and TTL not the masked values. */
    flow = flow_between("10.0.17.1", 0, "10.0.18.1", 4791);
    flow.ip_id = 0x718c;
    hdr_len = unhex(hdr, sizeof(hdr), "8100ffff4000011800000000");
    memset(payload, 0, 16);
    wire_seal_start(&state, &flow, hdr, hdr_len, 16);
    wire_seal_feed(&state, payload, 16);
    CHECK(wire_seal_finish(&state, tail) == 4);
    CHECK(memcmp(tail, "\x82\xfd\x00\x2a", 4) == 0);
}

/* A receiver that does not know the identification finds it, whatever it is, and lets nothing else pass. */
static void test_icrc_any_identification(void) {
    static const size_t lengths[] = {0, 1, 5, 64, 1000, 4096};

    for (size_t l = 0; l < sizeof(lengths) / sizeof(lengths[0]); l++) {
        struct wire_flow sender = flow_between("127.32.1.1", 4791, "127.32.2.1", 4791), strict = sender,
                         receiver = sender;
        struct wire_packet pkt = {.bth = {.opcode = WIRE_OP_WRITE_ONLY, .pkey = 0xffff, .dest_qpn = 17}}, got;
        static uint8_t data[WIRE_MAX_PACKET_LEN], payload[4096];

        receiver.any_id = true;
        for (uint32_t id = 0; id < 0x10000; id += lengths[l] < 100 ? 1 : 251) {
            size_t len;

            sender.ip_id = (uint16_t)id;
            len = make_datagram(data, &pkt, &sender, payload, lengths[l]);
            CHECK(wire_parse(&got, &receiver, data, len) == WIRE_OK);
            CHECK(wire_parse(&got, &strict, data, len) == (id ? WIRE_ERR_ICRC : WIRE_OK));
        }
        /* Every single damaged bit outside the masked byte and the identification's reach is still seen. */
        sender.ip_id = 0xbeef;
        size_t len = make_datagram(data, &pkt, &sender, payload, lengths[l]), passed = 0;

        for (size_t bit = 0; bit < len * 8; bit++) {
            flip_bit(data, bit);
            passed += wire_parse(&got, &receiver, data, len) == WIRE_OK;
            flip_bit(data, bit);
        }
        CHECK(passed == 8); /* BTH's byte of congestion bits */
    }
    /* The identification itself comes out. */
    uint8_t id_bytes[2 + 100] = {0x71, 0x8c};
    uint16_t id = 0;

    CHECK(wire_icrc_ip_id(wire_crc32(0, id_bytes, sizeof(id_bytes)), 100, &id) && id == 0x718c);
    CHECK(!wire_icrc_ip_id(0x12345678, 100, &id));
}

/* Fields that a switch may change are not covered; all others are. */
static void test_icrc_coverage(void) {
    struct wire_flow flow = flow_between("127.32.1.1", 4791, "127.32.2.1", 4791), other;
    struct wire_packet pkt = {
        .bth = {.opcode = WIRE_OP_SEND_ONLY, .pkey = 0xffff, .dest_qpn = 17, .psn = 99}};
    uint8_t data[256];
    size_t len = make_datagram(data, &pkt, &flow, (const uint8_t *)"hello", 5);

    CHECK(parse_exact(&pkt, &flow, data, len) == WIRE_OK);
    for (size_t bit = 0; bit < len * 8; bit++) {
        enum wire_error rc;

        flip_bit(data, bit);
        rc = parse_exact(&pkt, &flow, data, len);
        CHECK(bit / 8 == 4 ? rc == WIRE_OK : rc != WIRE_OK);
        flip_bit(data, bit);
    }
    other = flow;
    other.src_ip ^= htonl(1);
    CHECK(parse_exact(&pkt, &other, data, len) == WIRE_ERR_ICRC);
    other = flow;
    other.dst_ip ^= htonl(1);
    CHECK(parse_exact(&pkt, &other, data, len) == WIRE_ERR_ICRC);
    other = flow;
    other.src_port ^= 1;
    CHECK(parse_exact(&pkt, &other, data, len) == WIRE_ERR_ICRC);
    other = flow;
    other.ip_id = 1;
    CHECK(parse_exact(&pkt, &other, data, len) == WIRE_ERR_ICRC);
    CHECK(parse_exact(&pkt, NULL, data, len) == WIRE_OK);
}

/* The seal does not depend on how the payload is cut into pieces. */
static void test_seal_pieces(void) {
    struct wire_flow flow = flow_between("127.32.1.1", 4791, "127.32.2.1", 4791);
    uint8_t payload[1000], hdr[WIRE_MAX_HDR_LEN], one[WIRE_MAX_TAIL_LEN], two[WIRE_MAX_TAIL_LEN];

    for (size_t i = 0; i < sizeof(payload); i++)
        payload[i] = (uint8_t)(i * 31);
    for (size_t len = 0; len <= sizeof(payload); len += 111) {
        struct wire_packet pkt = {.bth = {.opcode = WIRE_OP_SEND_ONLY_IMM}, .imm_data = 0x12345678};
        size_t hdr_len = wire_pack_headers(hdr, &pkt, len);
        struct iovec whole = {payload, len};
        size_t tail_len = wire_seal(one, &flow, hdr, hdr_len, &whole, 1);

        CHECK(tail_len == (-len & 3) + 4);
        for (size_t cut = 0; cut <= len; cut += 13) {
            struct iovec parts[3] = {{payload, cut}, {payload + cut, 0}, {payload + cut, len - cut}};

            CHECK(wire_seal(two, &flow, hdr, hdr_len, parts, 3) == tail_len &&
                  memcmp(one, two, tail_len) == 0);
        }
    }
}

static void test_opcode_table(void) {
    int known = 0;

    for (int opcode = 0; opcode < 256; opcode++) {
        struct wire_packet pkt = {.bth = {.opcode = (uint8_t)opcode}};
        uint8_t hdr[WIRE_MAX_HDR_LEN];
        uint32_t flags = wire_opcode_flags((uint8_t)opcode);
        size_t len = wire_pack_headers(hdr, &pkt, 0);

        CHECK((flags != 0) == (len != 0));
        CHECK((flags == 0) == (strcmp(wire_opcode_name((uint8_t)opcode), "UNKNOWN") == 0));
        if (!flags)
            continue;
        known++;
        CHECK(flags & WIRE_F_VALID);
        CHECK(opcode == WIRE_CNP || !(flags & WIRE_F_REQUEST) != !(flags & WIRE_F_RESPONSE));
        CHECK(!(flags & WIRE_F_MIDDLE) == !!(flags & (WIRE_F_FIRST | WIRE_F_LAST)));
        CHECK(len >= WIRE_BTH_LEN && len + WIRE_ICRC_LEN <= WIRE_MAX_HDR_LEN);
    }
    CHECK(known == 23 + 12 + 2 + 1);
}

static void test_malformed(void) {
    struct wire_flow flow = flow_between("127.32.1.1", 4791, "127.32.2.1", 4791);
    struct wire_packet pkt;
    uint8_t data[256] = {0};
    size_t len;

    CHECK(parse_exact(&pkt, &flow, data, 0) == WIRE_ERR_SHORT);
    CHECK(parse_exact(&pkt, &flow, data, 15) == WIRE_ERR_SHORT);
    for (int opcode = 0; opcode < 256; opcode++) {
        uint32_t flags = wire_opcode_flags((uint8_t)opcode);

        pkt = (struct wire_packet){.bth = {.opcode = (uint8_t)opcode}};
        if (!flags) {
            memset(data, 0, sizeof(data));
            data[0] = (uint8_t)opcode;
            CHECK(parse_exact(&pkt, NULL, data, 64) == WIRE_ERR_OPCODE);
            continue;
        }
        len = make_datagram(data, &pkt, &flow, NULL, 0);
        CHECK(parse_exact(&pkt, &flow, data, len) == WIRE_OK && pkt.payload_len == 0);
        /* Every shorter length: headers missing, or a length that no packet has. */
        for (size_t shorter = 0; shorter < len; shorter++) {
            enum wire_error rc = parse_exact(&pkt, &flow, data, shorter);

            CHECK(rc == (shorter < WIRE_BTH_LEN + WIRE_ICRC_LEN ? WIRE_ERR_SHORT : WIRE_ERR_TRUNCATED));
        }
        /* Payload where none belongs, odd lengths, padding without payload, transport version 1. */
        memset(data + len, 0, 8);
        CHECK(parse_exact(&pkt, NULL, data, len + 4) ==
              (flags & WIRE_F_PAYLOAD ? WIRE_OK : WIRE_ERR_PAYLOAD));
        for (size_t more = 1; more < 4; more++)
            CHECK(parse_exact(&pkt, NULL, data, len + more) == WIRE_ERR_PAYLOAD);
        data[1] |= 0x30;
        CHECK(parse_exact(&pkt, NULL, data, len) == WIRE_ERR_PAD);
        data[1] ^= 0x31;
        CHECK(parse_exact(&pkt, NULL, data, len) == WIRE_ERR_VERSION);
    }
    for (int error = 0; error < WIRE_ERR_COUNT; error++)
        CHECK(strlen(wire_error_name((enum wire_error)error)) > 1);
    CHECK(strcmp(wire_error_name((enum wire_error)99), "unknown error") == 0);
}

/* Random bytes and damaged packets: whatever comes, nothing is read outside, and damage does not pass. */
static void test_random_damage(unsigned seed) {
    struct wire_flow flow = flow_between("127.32.1.1", 4791, "127.32.2.1", 4791);

    random_state = seed;
    for (int turn = 0; turn < 20000; turn++) {
        struct wire_packet pkt;
        uint8_t data[200], before[200];
        size_t len = next_random() % sizeof(data);

        for (size_t i = 0; i < len; i++)
            data[i] = (uint8_t)next_random();
        if (len && turn & 1)
            data[0] %= 0x18;
        if (len > 1)
            data[1] &= 0xf0;
        if (parse_exact(&pkt, NULL, data, len) == WIRE_OK) {
            CHECK(pkt.payload_len < len && pkt.flags);
            CHECK(parse_exact(&pkt, &flow, data, len) == WIRE_ERR_ICRC);
        }
        /* Cut and damage a good one. */
        pkt = (struct wire_packet){.bth = {.opcode = WIRE_OP_WRITE_ONLY_IMM, .psn = 5}};
        len = make_datagram(data, &pkt, &flow, before, 0);
        memcpy(before, data, len);
        for (int i = 0; i < 3; i++)
            flip_bit(data, next_random() % (len * 8));
        before[4] = data[4];
        if (memcmp(before, data, len) != 0)
            CHECK(parse_exact(&pkt, &flow, data, len) != WIRE_OK);
    }
}

static void test_psn(void) {
    CHECK(wire_psn_cmp(5, 5) == 0);
    CHECK(wire_psn_cmp(5, 6) < 0 && wire_psn_cmp(6, 5) > 0);
    CHECK(wire_psn_cmp(0xffffff, 0) < 0 && wire_psn_cmp(0, 0xffffff) > 0);
    CHECK(wire_psn_cmp(0, 0x7fffff) < 0 && wire_psn_cmp(0x800001, 0) < 0);
    CHECK(wire_psn_add(0xffffff, 2) == 1);
}

static void test_grh(void) {
    uint8_t grh[WIRE_GRH_LEN];
    uint32_t sum = 0;

    wire_make_grh_ipv4(grh, inet_addr("127.32.1.1"), inet_addr("127.33.2.9"), 300, 4, 64);
    for (int i = 0; i < 20; i++)
        CHECK(grh[i] == 0);
    CHECK(grh[20] == 0x45 && grh[22] == 1 && grh[23] == 44 && grh[29] == 17);
    CHECK(memcmp(grh + 32, "\x7f\x20\x01\x01\x7f\x21\x02\x09", 8) == 0);
    for (int i = 20; i < 40; i += 2)
        sum += (uint32_t)grh[i] << 8 | grh[i + 1];
    sum = (sum & 0xffff) + (sum >> 16);
    CHECK(sum == 0xffff); /* a header whose checksum is right sums up to all ones */

    memset(grh, 0xaa, sizeof(grh));
    wire_make_grh(grh, (const uint8_t *)"the source's GID", (const uint8_t *)"the other's GID.", 300,
                  WIRE_NEXT_BTH, 63);
    CHECK(memcmp(grh, "\x60\0\0\0\x01\x2c\x1b\x3fthe source's GIDthe other's GID.", 40) == 0);
}

/* "src sport dst dport opcode flags qpn psn pkey va rkey length syndrome msn swap compare ack imm qkey srcqpn
 *  payload datagram"; flags: 1 solicited, 2 migreq, 4 fecn, 8 becn, 16 ackreq, from 32 on the reserved bits; payload "-" = none. */
static void test_vectors(void) {
    static char line[20000], payload_hex[9000], datagram_hex[10000];
    static uint8_t payload[4500], wanted[5000], packed[5000];
    int count = 0;

    while (fgets(line, sizeof(line), stdin)) {
        char src[32], dst[32];
        unsigned sport, dport, opcode, flags, qpn, psn, pkey, rkey, length, syndrome, msn, imm, qkey, srcqpn;
        uint64_t va, swap, compare, ack;
        struct wire_packet in = {0}, out;
        struct wire_flow flow;
        size_t payload_len, wanted_len;
        int n =
            sscanf(line,
                   "%31s %u %31s %u %x %x %x %x %x %" SCNx64 " %x %x %x %x %" SCNx64 " %" SCNx64 " %" SCNx64
                   " %x %x %x %8999s %9999s",
                   src, &sport, dst, &dport, &opcode, &flags, &qpn, &psn, &pkey, &va, &rkey, &length,
                   &syndrome, &msn, &swap, &compare, &ack, &imm, &qkey, &srcqpn, payload_hex, datagram_hex);

        CHECK(n == 22);
        if (n != 22)
            return;
        count++;
        flow = flow_between(src, (uint16_t)sport, dst, (uint16_t)dport);
        payload_len = unhex(payload, sizeof(payload), payload_hex);
        wanted_len = unhex(wanted, sizeof(wanted), datagram_hex);
        in.bth = (struct wire_bth){.opcode = (uint8_t)opcode,
                                   .solicited = flags & 1,
                                   .migreq = flags >> 1 & 1,
                                   .fecn = flags >> 2 & 1,
                                   .becn = flags >> 3 & 1,
                                   .ack_req = flags >> 4 & 1,
                                   .reserved = flags >> 5 & 0x3f,
                                   .pkey = (uint16_t)pkey,
                                   .dest_qpn = qpn,
                                   .psn = psn};
        in.reth = (struct wire_reth){va, rkey, length};
        in.aeth = (struct wire_aeth){(uint8_t)syndrome, msn};
        in.atomic = (struct wire_atomic_eth){va, rkey, swap, compare};
        in.atomic_ack = ack;
        in.imm_data = htonl(imm);
        in.deth = (struct wire_deth){qkey, srcqpn};
        CHECK(make_datagram(packed, &in, &flow, payload, payload_len) == wanted_len);
        CHECK(memcmp(packed, wanted, wanted_len) == 0);

        CHECK(wire_parse(&out, &flow, wanted, wanted_len) == WIRE_OK);
        CHECK(out.payload_len == payload_len && memcmp(out.payload, payload, payload_len) == 0);
        CHECK(out.flags == wire_opcode_flags((uint8_t)opcode));
        CHECK(out.bth.opcode == opcode && out.bth.dest_qpn == qpn && out.bth.psn == psn &&
              out.bth.pkey == pkey);
        CHECK(out.bth.solicited == in.bth.solicited && out.bth.migreq == in.bth.migreq);
        CHECK(out.bth.fecn == in.bth.fecn && out.bth.becn == in.bth.becn &&
              out.bth.ack_req == in.bth.ack_req && out.bth.reserved == in.bth.reserved);
        if (out.flags & WIRE_F_RETH)
            CHECK(out.reth.va == va && out.reth.rkey == rkey && out.reth.length == length);
        if (out.flags & WIRE_F_AETH)
            CHECK(out.aeth.syndrome == syndrome && out.aeth.msn == msn);
        if (out.flags & WIRE_F_ATOMIC_ETH)
            CHECK(out.atomic.va == va && out.atomic.rkey == rkey && out.atomic.swap_add == swap &&
                  out.atomic.compare == compare);
        if (out.flags & WIRE_F_ATOMIC_ACK_ETH)
            CHECK(out.atomic_ack == ack);
        if (out.flags & (WIRE_F_IMM | WIRE_F_IETH))
            CHECK(out.imm_data == in.imm_data);
        if (out.flags & WIRE_F_DETH)
            CHECK(out.deth.qkey == qkey && out.deth.src_qpn == srcqpn);
    }
    CHECK(count > 0);
    printf("vectors=%d ", count);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "vectors") == 0) {
        test_vectors();
    } else {
        unsigned seed = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 0) : 1;

        test_crc32();
        test_icrc_known_answers();
        test_icrc_coverage();
        test_icrc_any_identification();
        test_seal_pieces();
        test_opcode_table();
        test_malformed();
        test_random_damage(seed);
        test_psn();
        test_grh();
        printf("seed=%u ", seed);
    }
    printf("checks=%d failures=%d\n", checks, failures);
    return failures != 0;
}
