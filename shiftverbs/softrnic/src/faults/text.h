/* SPDX-License-Identifier: BSD-3-Clause */
/* Text of which it is not known how long it gets. */
#ifndef SOFTRNIC_TEXT_H
#define SOFTRNIC_TEXT_H

#include <stddef.h>

struct text {
    char *at;
    size_t len, used; /* used counts what would have been written, too */
};

__attribute__((format(printf, 2, 3))) void text_append(struct text *text, const char *format, ...);

#endif
