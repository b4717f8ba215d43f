/* SPDX-License-Identifier: BSD-3-Clause */
#include "fabric/dcqcn.h"

#define SECOND_NS 1e9
/* Halving the distance to the line never closes it. */
#define LINE_REACHED 0.9999

bool dcqcn_handle_mark(struct dcqcn_np *np, const struct dcqcn_params *params, uint64_t now_ns) {
    if (!(params->g > 0) || now_ns < np->next_ns)
        return false;
    np->next_ns = now_ns + params->cnp_ns;
    return true;
}

/* By squaring: an idle QP may have missed millions of periods. */
static double power(double base, uint64_t n) {
    double result = 1;

    for (; n; n >>= 1, base *= base)
        if (n & 1)
            result *= base;
    return result;
}

/* Alpha, with what a time without CNPs left of it. */
static void run_alpha(struct dcqcn_rp *rp, const struct dcqcn_params *params, uint64_t now_ns) {
    uint64_t n;

    if (!rp->alpha_at) {
        rp->alpha = 1; /* this is the first */
    } else if (now_ns >= rp->alpha_at) {
        n = (now_ns - rp->alpha_at) / params->alpha_ns + 1;
        rp->alpha *= power(1 - params->g, n);
    }
    rp->alpha_at = now_ns + params->alpha_ns;
}

/* One step of the timer or of the byte counter (figure 7 there). */
static void increase(struct dcqcn_rp *rp, const struct dcqcn_params *params, double line) {
    uint32_t most = rp->timer_steps > rp->byte_steps ? rp->timer_steps : rp->byte_steps;
    uint32_t least = rp->timer_steps < rp->byte_steps ? rp->timer_steps : rp->byte_steps;

    if (least > params->recoveries)
        rp->target += params->hai;
    else if (most > params->recoveries)
        rp->target += params->ai;
    if (rp->target > line)
        rp->target = line;
    rp->rate = (rp->rate + rp->target) / 2;
    if (rp->rate >= line * LINE_REACHED)
        rp->limited = false;
}

static void run_timer(struct dcqcn_rp *rp, const struct dcqcn_params *params, double line, uint64_t now_ns) {
    for (; rp->limited && now_ns >= rp->timer_at; rp->timer_at += params->timer_ns) {
        rp->timer_steps++;
        increase(rp, params, line);
    }
}

void dcqcn_handle_cnp(struct dcqcn_rp *rp, const struct dcqcn_params *params, double line, uint64_t now_ns) {
    run_alpha(rp, params, now_ns);
    run_timer(rp, params, line, now_ns);
    if (!rp->limited)
        rp->rate = line;
    if (!rp->limited || params->clamp || rp->timer_steps || rp->byte_steps)
        rp->target = rp->rate;
    rp->limited = true;
    rp->rate *= 1 - rp->alpha / 2;
    if (rp->rate < params->min_rate)
        rp->rate = params->min_rate;
    rp->alpha = (1 - params->g) * rp->alpha + params->g;
    rp->timer_at = now_ns + params->timer_ns;
    rp->timer_steps = rp->byte_steps = 0;
    rp->bytes = 0;
}

static double rate_of(const struct dcqcn_rp *rp, double line) {
    return rp->limited && rp->rate < line ? rp->rate : line;
}

uint64_t dcqcn_sent(struct dcqcn_rp *rp, const struct dcqcn_params *params, double line, uint64_t now_ns,
                    uint32_t bytes) {
    struct dcqcn_rp ahead;
    double bits = 8.0 * bytes;

    run_timer(rp, params, line, now_ns);
    rp->bytes += bytes;
    for (; rp->limited && rp->bytes >= params->bytes; rp->bytes -= params->bytes) {
        rp->byte_steps++;
        increase(rp, params, line);
    }
    /* A slow QP's next packet must not wait by a rate that has long been raised when it goes. */
    for (ahead = *rp; ahead.limited; run_timer(&ahead, params, line, now_ns)) {
        double until_step = rate_of(&ahead, line) * (double)(ahead.timer_at - now_ns) / SECOND_NS;

        if (until_step >= bits)
            break;
        bits -= until_step;
        now_ns = ahead.timer_at;
    }
    return now_ns + (uint64_t)(bits * SECOND_NS / rate_of(&ahead, line));
}
