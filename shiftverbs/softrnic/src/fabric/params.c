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

static const struct unit amounts[] = {
    {"G", UINT64_C(1000000000000)}, {"M", 1000000000}, {"K", 1000000}, {"k", 1000000}, {"", 1000}, {NULL, 0}};
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

static int parse_setting(struct piece setting, struct fabric_params *params, char *err, size_t err_len) {
    struct piece value = setting, key;

    if (!memchr(setting.at, '=', setting.len))
        return wrong(err, err_len, setting, "KEY=VALUE with rate, delay or buffer, or off alone");
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
    } else {
        return wrong(err, err_len, setting, "KEY=VALUE with rate, delay or buffer, or off alone");
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
    *params = (struct fabric_params){.delay_ns = FABRIC_DELAY_NS, .buffer = FABRIC_BUFFER};
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
