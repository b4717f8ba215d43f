/* SPDX-License-Identifier: BSD-3-Clause */
/* Where callgrind writes down what it has counted so far, and begins anew. */
#include <valgrind/callgrind.h>

void phase(void);

void phase(void) {
    CALLGRIND_DUMP_STATS;
}
