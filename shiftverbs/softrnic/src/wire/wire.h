/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The RoCEv2 wire format: InfiniBand transport headers in UDP (IBA vol. 1, chapter 9, and annex A17).
 *
 * Pure code: no sockets, no clock, no allocation, no global state but constant tables. Multi-byte values in
 * the structs below are in host order, with one exception that verbs itself makes: immediate data and the
 * rkey of "send with invalidate" (`imm_data`) travel as the application gave them, in network order.
 */
#ifndef SOFTRNIC_WIRE_H
#define SOFTRNIC_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define WIRE_UDP_PORT 4791
#define WIRE_BTH_LEN 12
#define WIRE_RETH_LEN 16
#define WIRE_AETH_LEN 4
#define WIRE_ATOMIC_ETH_LEN 28
#define WIRE_ATOMIC_ACK_ETH_LEN 8
#define WIRE_IMM_LEN 4
#define WIRE_DETH_LEN 8
#define WIRE_ICRC_LEN 4
#define WIRE_GRH_LEN 40
#define WIRE_MAX_HDR_LEN 64 /* more than any combination of headers an opcode can have */
#define WIRE_MAX_TAIL_LEN (3 + WIRE_ICRC_LEN)
#define WIRE_MAX_PACKET_LEN (WIRE_MAX_HDR_LEN + 4096 + WIRE_MAX_TAIL_LEN)
#define WIRE_PSN_MASK 0xffffffu
#define WIRE_QPN_MASK 0xffffffu
#define WIRE_MSN_MASK 0xffffffu
#define WIRE_DEFAULT_PKEY 0xffff

/* Transport service: the top three bits of the opcode. */
enum wire_transport { WIRE_RC = 0x00, WIRE_UC = 0x20, WIRE_RD = 0x40, WIRE_UD = 0x60, WIRE_XRC = 0xa0 };

/* Operation: the low five bits of the opcode. */
enum wire_operation {
    WIRE_OP_SEND_FIRST = 0x00,
    WIRE_OP_SEND_MIDDLE = 0x01,
    WIRE_OP_SEND_LAST = 0x02,
    WIRE_OP_SEND_LAST_IMM = 0x03,
    WIRE_OP_SEND_ONLY = 0x04,
    WIRE_OP_SEND_ONLY_IMM = 0x05,
    WIRE_OP_WRITE_FIRST = 0x06,
    WIRE_OP_WRITE_MIDDLE = 0x07,
    WIRE_OP_WRITE_LAST = 0x08,
    WIRE_OP_WRITE_LAST_IMM = 0x09,
    WIRE_OP_WRITE_ONLY = 0x0a,
    WIRE_OP_WRITE_ONLY_IMM = 0x0b,
    WIRE_OP_READ_REQUEST = 0x0c,
    WIRE_OP_READ_RESP_FIRST = 0x0d,
    WIRE_OP_READ_RESP_MIDDLE = 0x0e,
    WIRE_OP_READ_RESP_LAST = 0x0f,
    WIRE_OP_READ_RESP_ONLY = 0x10,
    WIRE_OP_ACK = 0x11,
    WIRE_OP_ATOMIC_ACK = 0x12,
    WIRE_OP_CMP_SWAP = 0x13,
    WIRE_OP_FETCH_ADD = 0x14,
    WIRE_OP_SEND_LAST_INV = 0x16,
    WIRE_OP_SEND_ONLY_INV = 0x17,
};

/* A congestion notification packet of RoCEv2 (annex A17.9.3): BTH with BECN, and so many bytes that are 0. */
#define WIRE_CNP 0x81
#define WIRE_CNP_PAYLOAD 16

#define WIRE_OPCODE(transport, operation) ((uint8_t)((transport) | (operation)))
#define WIRE_TRANSPORT(opcode) ((opcode)&0xe0)
#define WIRE_OPERATION(opcode) ((opcode)&0x1f)

/* What an opcode means: bits returned by wire_opcode_flags(). 0 = an opcode this code does not know. */
enum wire_opcode_flag {
    WIRE_F_VALID = 1 << 0,
    WIRE_F_RETH = 1 << 1,
    WIRE_F_AETH = 1 << 2,
    WIRE_F_ATOMIC_ETH = 1 << 3,
    WIRE_F_ATOMIC_ACK_ETH = 1 << 4,
    WIRE_F_IMM = 1 << 5,
    WIRE_F_IETH = 1 << 6,
    WIRE_F_DETH = 1 << 7,
    WIRE_F_PAYLOAD = 1 << 8, /* may carry payload */
    WIRE_F_FIRST = 1 << 9,   /* first packet of a message ("only" sets both FIRST and LAST) */
    WIRE_F_MIDDLE = 1 << 10,
    WIRE_F_LAST = 1 << 11,
    WIRE_F_SEND = 1 << 12,
    WIRE_F_WRITE = 1 << 13,
    WIRE_F_READ_REQ = 1 << 14,
    WIRE_F_READ_RESP = 1 << 15,
    WIRE_F_ATOMIC = 1 << 16,     /* a request */
    WIRE_F_ACK = 1 << 17,        /* ACK, NAK or RNR NAK packet */
    WIRE_F_ATOMIC_ACK = 1 << 18, /* response to an atomic */
    WIRE_F_REQUEST = 1 << 19,    /* goes to the responder */
    WIRE_F_RESPONSE = 1 << 20,   /* goes to the requester */
};

uint32_t wire_opcode_flags(uint8_t opcode);
/* "RC_SEND_ONLY" and so on; "UNKNOWN" if it is none of ours. Never NULL. */
const char *wire_opcode_name(uint8_t opcode);

/* AETH syndrome (IBA 9.7.5.2.1): bits 6..5 say ACK, RNR NAK or NAK, bits 4..0 the credit count, timer or NAK
 * code. */
#define WIRE_SYN_KIND(s) ((s)&0x60)
#define WIRE_SYN_VALUE(s) ((s)&0x1f)
enum wire_syndrome { WIRE_SYN_ACK = 0x00, WIRE_SYN_RNR = 0x20, WIRE_SYN_NAK = 0x60 };
#define WIRE_ACK_CREDIT_INVALID 0x1f /* no end-to-end credits: what an RNIC without them writes in an ACK */
enum wire_nak_code {
    WIRE_NAK_PSN_SEQ = 0,
    WIRE_NAK_INVALID_REQ = 1,
    WIRE_NAK_REMOTE_ACCESS = 2,
    WIRE_NAK_REMOTE_OP = 3,
    WIRE_NAK_INVALID_RD = 4,
};

struct wire_bth {
    uint8_t opcode;
    bool solicited;
    bool migreq;
    uint8_t pad; /* bytes after the payload, 0..3; wire_pack_headers() computes it */
    uint16_t pkey;
    bool fecn;
    bool becn;
    uint8_t reserved;  /* 6 bits that no ICRC covers; objects/nic.h has a use for them */
    uint32_t dest_qpn; /* 24 bits */
    bool ack_req;
    uint32_t psn; /* 24 bits */
};

struct wire_reth {
    uint64_t va;
    uint32_t rkey;
    uint32_t length; /* bytes of the whole message */
};

struct wire_aeth {
    uint8_t syndrome;
    uint32_t msn; /* 24 bits */
};

struct wire_atomic_eth {
    uint64_t va;
    uint32_t rkey;
    uint64_t swap_add;
    uint64_t compare;
};

struct wire_deth {
    uint32_t qkey;
    uint32_t src_qpn; /* 24 bits */
};

/* One packet, parsed or to be packed. Which of the extension headers count is told by the opcode alone. */
struct wire_packet {
    struct wire_bth bth;
    struct wire_reth reth;
    struct wire_aeth aeth;
    struct wire_atomic_eth atomic;
    uint64_t atomic_ack; /* the value before the atomic */
    uint32_t imm_data;   /* ImmDt, or IETH's rkey; network order, as in ibv_send_wr and ibv_wc */
    struct wire_deth deth;
    uint32_t flags;         /* wire_opcode_flags(bth.opcode); set by wire_parse() */
    const uint8_t *payload; /* points into the datagram given to wire_parse() */
    size_t payload_len;     /* without padding */
};

/*
 * What ICRC covers of the packet's IPv4 and UDP headers. Addresses and ports in network order, as in
 * sockaddr_in. id_frag is {identification, flags + fragment offset}: an unconnected Linux UDP socket with
 * IP_MTU_DISCOVER set to IP_PMTUDISC_DO sends identification 0 and DF, which is what wire_flow_init() fills
 * in. A UDP socket does not tell what identification a received packet had, and a kernel's RoCE sets one:
 * any_id says that it is unknown (see wire_icrc_ip_id).
 */
struct wire_flow {
    uint32_t src_ip;
    uint32_t dst_ip;
    uint16_t src_port;
    uint16_t dst_port;
    uint16_t ip_id;   /* host order */
    uint16_t ip_frag; /* host order */
    bool any_id;      /* wire_parse() only */
};

void wire_flow_init(struct wire_flow *flow, uint32_t src_ip, uint16_t src_port, uint32_t dst_ip,
                    uint16_t dst_port);

/* What is wrong with a datagram. wire_error_name() names it for logs and counters. */
enum wire_error {
    WIRE_OK = 0,
    WIRE_ERR_SHORT,     /* shorter than BTH + ICRC */
    WIRE_ERR_VERSION,   /* BTH transport version is not 0 */
    WIRE_ERR_OPCODE,    /* not an opcode we know */
    WIRE_ERR_TRUNCATED, /* shorter than the headers its opcode asks for */
    WIRE_ERR_PAD,       /* pad count greater than the payload, or set where no payload may be */
    WIRE_ERR_PAYLOAD,   /* payload on an opcode that has none, or a length that is not a multiple of 4 */
    WIRE_ERR_ICRC,      /* damaged */
    WIRE_ERR_COUNT      /* number of codes, for counter arrays */
};
const char *wire_error_name(enum wire_error error);

/*
 * Write BTH and the extension headers that pkt->bth.opcode has, and set pkt->bth.pad from payload_len.
 * buf needs WIRE_MAX_HDR_LEN bytes. Returns the number of bytes written; 0 if the opcode is unknown.
 */
size_t wire_pack_headers(uint8_t *buf, struct wire_packet *pkt, size_t payload_len);

/*
 * The end of a packet: padding to a multiple of 4 and ICRC, over the packed headers and the payload in iov.
 * tail needs WIRE_MAX_TAIL_LEN bytes. Returns the number of bytes written. The datagram is hdr + iov + tail.
 */
size_t wire_seal(uint8_t *tail, const struct wire_flow *flow, const uint8_t *hdr, size_t hdr_len,
                 const struct iovec *iov, size_t iov_count);

/*
 * The same on the fly: start with the flow, the packed headers and the payload length, feed the payload in
 * pieces (each a read of memory that may also be copied), finish. For senders that copy and checksum in one
 * go.
 */
struct wire_seal_state {
    uint32_t crc;
    uint8_t pad;
};
void wire_seal_start(struct wire_seal_state *state, const struct wire_flow *flow, const uint8_t *hdr,
                     size_t hdr_len, size_t payload_len);
void wire_seal_feed(struct wire_seal_state *state, const void *data, size_t len);
size_t wire_seal_finish(struct wire_seal_state *state, uint8_t *tail);

/*
 * Check and take apart one received datagram (the UDP payload). flow as seen by the *sender* (src = where it
 * came from). NULL for flow skips the ICRC check. On error *pkt has the BTH if there was one and is otherwise
 * unspecified.
 */
enum wire_error wire_parse(struct wire_packet *pkt, const struct wire_flow *flow, const uint8_t *data,
                           size_t len);

/*
 * The 40 bytes that a UD receive shows before its payload. For IPv4 the last 20 are the IPv4 header and the
 * first 20 are undefined (IBA A17.4.5.2); here they are zero. ip_len is the datagram's IPv4 total length.
 */
void wire_make_grh_ipv4(uint8_t grh[WIRE_GRH_LEN], uint32_t src_ip, uint32_t dst_ip, uint16_t ip_len,
                        uint8_t tos, uint8_t ttl);

/*
 * The same for what comes with an IPv6 header (RoCE v2) or a GRH (RoCE v1), which have one layout (IBA 8.3).
 * payload_len: of the datagram with its UDP header, or from the BTH on; next_header: WIRE_NEXT_UDP or WIRE_NEXT_BTH.
 */
#define WIRE_NEXT_UDP 17
#define WIRE_NEXT_BTH 0x1b
void wire_make_grh(uint8_t grh[WIRE_GRH_LEN], const uint8_t src[16], const uint8_t dst[16],
                   uint16_t payload_len, uint8_t next_header, uint8_t hop_limit);

/*
 * Which identification explains an ICRC that is wrong for identification 0? The CRC is linear: `difference` (ICRC
 * received xor ICRC computed) is the CRC, without conditioning, of the identification alone with `bytes_after`
 * zeros behind it, and that can be undone. False if there is none; of packets with random damage one in 65,536 finds one,
 * and the UDP checksum has seen those first.
 */
bool wire_icrc_ip_id(uint32_t difference, size_t bytes_after, uint16_t *ip_id);

/* CRC32 of the IEEE 802.3 polynomial, bit-reversed, no pre- or post-conditioning. Exposed for tests. */
uint32_t wire_crc32(uint32_t crc, const void *data, size_t len);

/* 24-bit circular order: < 0, 0 or > 0 as a is before, equal to or after b. */
static inline int wire_psn_cmp(uint32_t a, uint32_t b) {
    return (int32_t)((a - b) << 8);
}

static inline uint32_t wire_psn_add(uint32_t psn, uint32_t n) {
    return (psn + n) & WIRE_PSN_MASK;
}

static inline bool wire_is_nak(const struct wire_packet *pkt) {
    return (pkt->flags & WIRE_F_ACK) && WIRE_SYN_KIND(pkt->aeth.syndrome) == WIRE_SYN_NAK;
}

#endif
