/* SPDX-License-Identifier: BSD-3-Clause */
#include "fabric/params.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define MAX_RAIL 15
#define MIN_RATE 1000
#define MAX_RATE UINT64_C(1000000000000)
#define MAX_DELAY_NS UINT64_C(10000000000)
#define MIN_BUFFER 8192 /* one packet of the largest size must fit */
#define MAX_BUFFER UINT64_C(1000000000000)
#define MAX_DILATION 1000000
#define KEYS                                                                                                 \
    "KEY=VALUE with rate, delay, buffer, dcqcn, kmin, kmax, pmax, pfc, xoff, xon, headroom, watchdog or "    \
    "dilation, or off alone"
#define MIN_WATCHDOG_NS 1000
#define NOT_GIVEN UINT64_MAX

/* A piece of the text, without white space around it. */
struct piece {
    const char *at;
    size_t len;
};

/* The name of a unit and how many of the smallest it is, in thousandths. */
struct unit {
    const char *name;
    uint64_t thousandths;
};

/* Congestion control by name: what the switch marks, and what the ends do. */
static const struct parameter_set {
    const char *name;
    uint64_t kmin, kmax;
    double pmax;
    struct dcqcn_params dcqcn;
} sets[] = {
    /* Zhu et al. 2015, section 5.2 and figure 14: without a hyper increase of another size. A floor it does not name. */
    {"sigcomm15", 5000, 200000, 0.01, {1.0 / 256, 50000, 55000, 55000, 10000000, 5, 40e6, 40e6, 10e6, true}},
    /*
     * What mlxconfig shows of a ConnectX: MIN_TIME_BETWEEN_CNPS 4, DCE_TCP_G 1019 (of 1024 what alpha keeps),
     * DCE_TCP_RTT 1, RPG_TIME_RESET 300, RPG_BYTE_RESET 32767, RPG_THRESHOLD 1, RPG_AI_RATE 5, RPG_HAI_RATE 50,
     * RPG_MIN_RATE 1, CLAMP_TGT_RATE 0. A NIC says nothing of the switch: it marks as in the authors' simulations.
     */
    {"connectx", 40000, 1000000, 1, {5.0 / 1024, 4000, 1000, 300000, 32767, 1, 5e6, 50e6, 1e6, false}},
};

static const struct unit amounts[] = {
    {"G", UINT64_C(1000000000000)}, {"M", 1000000000}, {"K", 1000000}, {"k", 1000000}, {"", 1000}, {NULL, 0}};
static const struct unit percents[] = {{"", 1000000}, {"%", 1000000}, {NULL, 0}}; /* in thousandths */
static const struct unit times[] = {
    {"ns", 1000}, {"us", 1000000}, {"ms", 1000000000}, {"s", UINT64_C(1000000000000)}, {NULL, 0}};

static struct piece trimmed(const char *at, size_t len) {
    while (len && isspace((unsigned char)*at))
        at++, len--;
    while (len && isspace((unsigned char)at[len - 1]))
        len--;
    return (struct piece){at, len};
}

/* The part of *rest before the first of these characters, which is taken off it too. */
static struct piece cut(struct piece *rest, char at) {
    const char *end = memchr(rest->at, at, rest->len);
    size_t len = end ? (size_t)(end - rest->at) : rest->len;
    struct piece part = trimmed(rest->at, len);

    rest->at += len + (end != NULL);
    rest->len -= len + (end != NULL);
    return part;
}

static bool is(struct piece piece, const char *text) {
    return piece.len == strlen(text) && memcmp(piece.at, text, piece.len) == 0;
}

static int wrong(char *err, size_t err_len, struct piece piece, const char *expected) {
    snprintf(err, err_len, "fabric: '%.*s': expected %s", (int)(piece.len > 80 ? 80 : piece.len), piece.at,
             expected);
    return -1;
}

/* "2.5G": digits, at most three behind a point, a unit. False if it is none or does not fit. */
static bool number(struct piece piece, const struct unit *units, uint64_t *value) {
    uint64_t thousandths = 0;
    unsigned places = 0;
    size_t i = 0;
    bool point = false, digits = false;

    for (; i < piece.len && (isdigit((unsigned char)piece.at[i]) || (piece.at[i] == '.' && !point)); i++) {
        if (piece.at[i] == '.') {
            point = true;
            continue;
        }
        if (places == 3 || thousandths > UINT64_C(1000000000000000))
            return false;
        digits = true;
        thousandths = thousandths * 10 + (uint64_t)(piece.at[i] - '0');
        places += point;
    }
    for (; places < 3; places++)
        thousandths *= 10;
    piece.at += i;
    piece.len -= i;
    for (; digits && units->name; units++)
        if (is(piece, units->name)) {
            unsigned __int128 product = (unsigned __int128)thousandths * units->thousandths / 1000000;

            *value = (uint64_t)product;
            return product <= UINT64_MAX;
        }
    return false;
}

static int parse_scope(struct piece piece, struct fabric_scope *scope, char *err, size_t err_len) {
    const char *slash = memchr(piece.at, '/', piece.len);
    struct piece rail = piece;
    unsigned n = 0;

    *scope = (struct fabric_scope){.rail = -1};
    if (slash) {
        size_t len = (size_t)(slash - piece.at);

        if (!len || len >= sizeof(scope->host))
            return wrong(err, err_len, piece, "a host of at most 31 characters before the '/'");
        memcpy(scope->host, piece.at, len);
        rail = (struct piece){slash + 1, piece.len - len - 1};
    }
    if (is(rail, "*"))
        return 0;
    if (rail.len < 5 || rail.len > 6 || memcmp(rail.at, "rail", 4) != 0)
        return wrong(err, err_len, piece, "rail0 to rail15, * for all, or HOST/rail0");
    for (size_t i = 4; i < rail.len; i++) {
        if (!isdigit((unsigned char)rail.at[i]))
            return wrong(err, err_len, piece, "rail0 to rail15, * for all, or HOST/rail0");
        n = n * 10 + (unsigned)(rail.at[i] - '0');
    }
    if (n > MAX_RAIL)
        return wrong(err, err_len, piece, "rail0 to rail15, * for all, or HOST/rail0");
    scope->rail = (int)n;
    return 0;
}

static int parse_set(struct piece value, struct fabric_params *params) {
    for (size_t i = 0; i < sizeof(sets) / sizeof(sets[0]); i++)
        if (is(value, sets[i].name)) {
            params->kmin = sets[i].kmin;
            params->kmax = sets[i].kmax;
            params->pmax = sets[i].pmax;
            params->dcqcn = sets[i].dcqcn;
            return 0;
        }
    return -1;
}

/* Rates divided by it, times multiplied, bytes as they are. */
static void dilate(struct fabric_params *params) {
    struct dcqcn_params *dcqcn = &params->dcqcn;
    uint32_t by = params->dilation;

    params->rate /= by;
    params->delay_ns *= by;
    dcqcn->cnp_ns *= by;
    dcqcn->alpha_ns *= by;
    dcqcn->timer_ns *= by;
    dcqcn->ai /= by;
    dcqcn->hai /= by;
    dcqcn->min_rate /= by;
    params->watchdog_ns *= by;
}

/* What flow control is, where it is not said; 0 where there is none. */
static int fill_in_pfc(struct piece entry, struct fabric_params *params, char *err, size_t err_len) {
    bool given = params->xoff != NOT_GIVEN || params->xon != NOT_GIVEN || params->headroom != NOT_GIVEN ||
                 params->watchdog_ns != NOT_GIVEN;

    if (!params->pfc) {
        params->xoff = params->xon = params->headroom = params->watchdog_ns = 0;
        return given ? wrong(err, err_len, entry, "pfc=on with xoff, xon, headroom or watchdog") : 0;
    }
    if (params->xoff == NOT_GIVEN)
        params->xoff = params->buffer / 4;
    if (params->xon == NOT_GIVEN)
        params->xon = params->xoff > FABRIC_XON_BELOW ? params->xoff - FABRIC_XON_BELOW : 0;
    /* What is under way when a pause is sent, three times, as in HPCC's switch; and packets that were begun. */
    if (params->headroom == NOT_GIVEN)
        params->headroom =
            (uint64_t)(3.0 * (double)params->rate * (double)params->delay_ns / 8e9) + MIN_BUFFER;
    if (params->watchdog_ns == NOT_GIVEN)
        params->watchdog_ns = FABRIC_WATCHDOG_NS;
    if (params->xon > params->xoff)
        return wrong(err, err_len, entry, "an xon that is not above xoff");
    if (params->xoff + params->headroom < MIN_BUFFER)
        return wrong(err, err_len, entry, "an xoff and a headroom of 8192 bytes together");
    return 0;
}

static int parse_setting(struct piece setting, struct fabric_params *params, char *err, size_t err_len) {
    struct piece value = setting, key;
    uint64_t n;

    if (!memchr(setting.at, '=', setting.len))
        return wrong(err, err_len, setting, KEYS);
    key = cut(&value, '=');
    value = trimmed(value.at, value.len);
    if (is(key, "rate")) {
        if (!number(value, amounts, &params->rate) || params->rate < MIN_RATE || params->rate > MAX_RATE)
            return wrong(err, err_len, setting, "a rate of 1K to 1000G bits per second");
    } else if (is(key, "delay")) {
        if (!number(value, times, &params->delay_ns) || params->delay_ns > MAX_DELAY_NS)
            return wrong(err, err_len, setting, "a time with its unit, such as 5us, of at most 10s");
    } else if (is(key, "buffer")) {
        if (!number(value, amounts, &params->buffer) || params->buffer < MIN_BUFFER ||
            params->buffer > MAX_BUFFER)
            return wrong(err, err_len, setting, "8192 to 1000G bytes");
    } else if (is(key, "dcqcn")) {
        if (parse_set(value, params) != 0)
            return wrong(err, err_len, setting, "sigcomm15 or connectx");
    } else if (is(key, "kmin") || is(key, "kmax")) {
        if (!number(value, amounts, is(key, "kmin") ? &params->kmin : &params->kmax) ||
            params->kmin > MAX_BUFFER || params->kmax > MAX_BUFFER)
            return wrong(err, err_len, setting, "0 to 1000G bytes");
    } else if (is(key, "pmax")) {
        if (!number(value, percents, &n) || n > 100000)
            return wrong(err, err_len, setting, "0 to 100 percent");
        params->pmax = (double)n / 100000;
    } else if (is(key, "pfc")) {
        params->pfc = is(value, "on");
        if (!params->pfc && !is(value, "off"))
            return wrong(err, err_len, setting, "on or off");
    } else if (is(key, "xoff") || is(key, "xon") || is(key, "headroom")) {
        if (!number(value, amounts, &n) || n > MAX_BUFFER)
            return wrong(err, err_len, setting, "0 to 1000G bytes");
        *(is(key, "xoff") ? &params->xoff : is(key, "xon") ? &params->xon : &params->headroom) = n;
    } else if (is(key, "watchdog")) {
        if (is(value, "off"))
            params->watchdog_ns = 0;
        else if (!number(value, times, &params->watchdog_ns) || params->watchdog_ns < MIN_WATCHDOG_NS ||
                 params->watchdog_ns > MAX_DELAY_NS)
            return wrong(err, err_len, setting, "off, or a time with its unit, of 1us to 10s");
    } else if (is(key, "dilation")) {
        if (!number(value, amounts, &n) || !n || n > MAX_DILATION)
            return wrong(err, err_len, setting, "1 to 1000000");
        params->dilation = (uint32_t)n;
    } else {
        return wrong(err, err_len, setting, KEYS);
    }
    return 0;
}

static int parse_entry(struct piece entry, struct fabric_scope *scope, struct fabric_params *params,
                       char *err, size_t err_len) {
    struct piece rest = entry;

    if (!memchr(entry.at, ':', entry.len))
        return wrong(err, err_len, entry, "RAIL:SETTINGS, such as rail0:rate=10G,delay=5us,buffer=1M");
    if (parse_scope(cut(&rest, ':'), scope, err, err_len) != 0)
        return -1;
    *params = (struct fabric_params){
        .delay_ns = FABRIC_DELAY_NS, .buffer = FABRIC_BUFFER, .pmax = 1, .dilation = 1};
    params->xoff = params->xon = params->headroom = params->watchdog_ns = NOT_GIVEN;
    rest = trimmed(rest.at, rest.len);
    if (is(rest, "off")) {
        *params = (struct fabric_params){0};
        return 0;
    }
    do {
        if (parse_setting(cut(&rest, ','), params, err, err_len) != 0)
            return -1;
    } while (rest.len);
    if (!params->rate)
        return wrong(err, err_len, entry, "a rate, or off");
    if (params->kmin > params->kmax)
        return wrong(err, err_len, entry, "a kmin that is not above kmax");
    if (params->rate / params->dilation < MIN_RATE)
        return wrong(err, err_len, entry, "a rate that dilation leaves 1K bits per second of");
    if (fill_in_pfc(entry, params, err, err_len) != 0)
        return -1;
    dilate(params);
    return 0;
}

int fabric_parse(const char **text, struct fabric_scope *scope, struct fabric_params *params, char *err,
                 size_t err_len) {
    while (**text) {
        size_t len = strcspn(*text, ";\n");
        const char *comment = memchr(*text, '#', len);
        struct piece entry;

        if (comment) /* to the end of the line, ';' or not */
            entry = trimmed(*text, (size_t)(comment - *text)), len = strcspn(*text, "\n");
        else
            entry = trimmed(*text, len);
        *text += len + ((*text)[len] != '\0');
        if (entry.len)
            return parse_entry(entry, scope, params, err, err_len) ? -1 : 1;
    }
    return 0;
}
