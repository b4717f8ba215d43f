/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The invariant CRC (IBA 7.8.1 and annex A17.3.3): CRC32 over everything that a switch does not change.
 * Fields that may change on the way (TOS, TTL, both checksums, BTH's congestion bits) count as ones, and
 * eight bytes of ones stand for the LRH that RoCEv2 has not.
 */
#include <arpa/inet.h>
#include <string.h>

#include "wire/wire.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_PCLMUL 1
#endif

#define POLYNOMIAL 0xedb88320u /* IEEE 802.3, bit-reversed */
#define IP_UDP_LEN 28

static uint32_t table[8][256];
static uint32_t inverse[16];
static int use_pclmul;

static uint32_t multiply(uint32_t a, uint32_t b);

/* At load time, so that the data path has no "is it ready" to ask. */
__attribute__((constructor)) static void make_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;

        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        table[0][i] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 0xff];
    inverse[0] = 1u << 31;
    for (int bit = 0; bit < 8; bit++) /* divide by x: the polynomial's x^32 fills the bit that falls out */
        inverse[0] = (inverse[0] ^ (inverse[0] & 1u << 31 ? POLYNOMIAL : 0)) << 1 | inverse[0] >> 31;
    for (int k = 1; k < 16; k++)
        inverse[k] = multiply(inverse[k - 1], inverse[k - 1]);
#ifdef HAVE_PCLMUL
    __builtin_cpu_init();
    use_pclmul = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#endif
}

static uint32_t crc_table(uint32_t crc, const uint8_t *p, size_t len) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; len >= 8; p += 8, len -= 8) {
        uint32_t low, high;

        memcpy(&low, p, 4);
        memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = table[7][low & 0xff] ^ table[6][low >> 8 & 0xff] ^ table[5][low >> 16 & 0xff] ^
              table[4][low >> 24] ^ table[3][high & 0xff] ^ table[2][high >> 8 & 0xff] ^
              table[1][high >> 16 & 0xff] ^ table[0][high >> 24];
    }
#endif
    for (; len; p++, len--)
        crc = crc >> 8 ^ table[0][(crc ^ *p) & 0xff];
    return crc;
}

#ifdef HAVE_PCLMUL
/*
 * Fold 64 bytes at a time with carry-less multiplication: a block multiplied by x^512 mod P can be added to
 * the block 512 bits further on without changing the CRC. The constants are x^(512+64), x^512, x^(128+64),
 * x^128 mod P, bit-reversed. What remains (16 bytes) is a message with the same CRC, left to the table.
 */
__attribute__((target("pclmul,sse4.1"))) static __m128i fold(__m128i block, __m128i constants, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(block, constants, 0x00);
    __m128i high = _mm_clmulepi64_si128(block, constants, 0x11);

    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_pclmul(uint32_t crc, const uint8_t *p,
                                                                    size_t len) {
    const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i *block = (const __m128i *)p;
    __m128i x0 = _mm_xor_si128(_mm_loadu_si128(block), _mm_cvtsi32_si128((int)crc));
    __m128i x1 = _mm_loadu_si128(block + 1);
    __m128i x2 = _mm_loadu_si128(block + 2);
    __m128i x3 = _mm_loadu_si128(block + 3);
    uint8_t rest[16];

    for (block += 4, len -= 64; len >= 64; block += 4, len -= 64) {
        x0 = fold(x0, by_512, _mm_loadu_si128(block));
        x1 = fold(x1, by_512, _mm_loadu_si128(block + 1));
        x2 = fold(x2, by_512, _mm_loadu_si128(block + 2));
        x3 = fold(x3, by_512, _mm_loadu_si128(block + 3));
    }
    x0 = fold(x0, by_128, x1);
    x0 = fold(x0, by_128, x2);
    x0 = fold(x0, by_128, x3);
    for (; len >= 16; block++, len -= 16)
        x0 = fold(x0, by_128, _mm_loadu_si128(block));
    _mm_storeu_si128((__m128i *)rest, x0);
    return crc_table(crc_table(0, rest, sizeof(rest)), (const uint8_t *)block, len);
}
#endif

uint32_t wire_crc32(uint32_t crc, const void *data, size_t len) {
#ifdef HAVE_PCLMUL
    if (len >= 64 && use_pclmul)
        return crc_pclmul(crc, data, len);
#endif
    return crc_table(crc, data, len);
}

/* --- the CRC as a polynomial: its value is what is left of the message divided by POLYNOMIAL --- */

/* a * b mod POLYNOMIAL; in the reversed order of bits the top bit is x^0. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;

    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = b >> 1 ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return product;
}

/* The register as it was before `len` bytes of zeros. */
static uint32_t before_zeros(uint32_t crc, size_t len) {
    /* inverse[k] = x^(-8 * 2^k); each is the square of the one before. */
    for (unsigned k = 0; len; k++, len >>= 1)
        if (len & 1)
            crc = multiply(crc, inverse[k]);
    return crc;
}

bool wire_icrc_ip_id(uint32_t difference, size_t bytes_after, uint16_t *ip_id) {
    /* Two bytes put into an empty register are the register itself, two bytes of zeros earlier. */
    uint32_t crc = before_zeros(difference, bytes_after + 2);

    if (crc > 0xffff)
        return false;
    *ip_id = (uint16_t)(crc << 8 | crc >> 8);
    return true;
}

void wire_flow_init(struct wire_flow *flow, uint32_t src_ip, uint16_t src_port, uint32_t dst_ip,
                    uint16_t dst_port) {
    *flow = (struct wire_flow){.src_ip = src_ip,
                               .dst_ip = dst_ip,
                               .src_port = src_port,
                               .dst_port = dst_port,
                               .ip_id = 0,
                               .ip_frag = 0x4000};
}

void wire_seal_start(struct wire_seal_state *state, const struct wire_flow *flow, const uint8_t *hdr,
                     size_t hdr_len, size_t payload_len) {
    /* Eight bytes for the absent LRH, IPv4, UDP, BTH with the masked fields set to ones. */
    uint8_t pseudo[8 + IP_UDP_LEN + WIRE_BTH_LEN];
    uint8_t *ip = pseudo + 8, *udp = ip + 20, *bth = udp + 8;
    uint16_t udp_len, ip_len;

    state->pad = -payload_len & 3;
    udp_len = (uint16_t)(8 + hdr_len + payload_len + state->pad + WIRE_ICRC_LEN);
    ip_len = udp_len + 20;
    memset(pseudo, 0xff, 8);
    ip[0] = 0x45;
    ip[1] = 0xff;
    ip[2] = ip_len >> 8;
    ip[3] = (uint8_t)ip_len;
    ip[4] = flow->ip_id >> 8;
    ip[5] = (uint8_t)flow->ip_id;
    ip[6] = flow->ip_frag >> 8;
    ip[7] = (uint8_t)flow->ip_frag;
    ip[8] = 0xff;
    ip[9] = 17;
    ip[10] = ip[11] = 0xff;
    memcpy(ip + 12, &flow->src_ip, 4);
    memcpy(ip + 16, &flow->dst_ip, 4);
    memcpy(udp, &flow->src_port, 2);
    memcpy(udp + 2, &flow->dst_port, 2);
    udp[4] = udp_len >> 8;
    udp[5] = (uint8_t)udp_len;
    udp[6] = udp[7] = 0xff;
    memcpy(bth, hdr, WIRE_BTH_LEN);
    bth[4] = 0xff;
    state->crc = crc_table(0xffffffffu, pseudo, sizeof(pseudo));
    state->crc = crc_table(state->crc, hdr + WIRE_BTH_LEN, hdr_len - WIRE_BTH_LEN);
}

void wire_seal_feed(struct wire_seal_state *state, const void *data, size_t len) {
    state->crc = wire_crc32(state->crc, data, len);
}

size_t wire_seal_finish(struct wire_seal_state *state, uint8_t *tail) {
    uint32_t icrc;

    memset(tail, 0, state->pad);
    icrc = ~crc_table(state->crc, tail, state->pad);
    /* Sent like Ethernet's FCS: the lowest byte first. */
    for (int i = 0; i < WIRE_ICRC_LEN; i++)
        tail[state->pad + i] = (uint8_t)(icrc >> 8 * i);
    return state->pad + WIRE_ICRC_LEN;
}

size_t wire_seal(uint8_t *tail, const struct wire_flow *flow, const uint8_t *hdr, size_t hdr_len,
                 const struct iovec *iov, size_t iov_count) {
    struct wire_seal_state state;
    size_t payload_len = 0;

    for (size_t i = 0; i < iov_count; i++)
        payload_len += iov[i].iov_len;
    wire_seal_start(&state, flow, hdr, hdr_len, payload_len);
    for (size_t i = 0; i < iov_count; i++)
        wire_seal_feed(&state, iov[i].iov_base, iov[i].iov_len);
    return wire_seal_finish(&state, tail);
}
