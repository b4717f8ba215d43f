/* SPDX-License-Identifier: BSD-3-Clause */
#include "faults/text.h"

#include <stdarg.h>
#include <stdio.h>

void text_append(struct text *text, const char *format, ...) {
    size_t room = text->used < text->len ? text->len - text->used : 0;
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(room ? text->at + text->used : NULL, room, format, args);
    va_end(args);
    if (n > 0)
        text->used += (size_t)n;
}
