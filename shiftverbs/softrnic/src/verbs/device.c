/* SPDX-License-Identifier: BSD-3-Clause */
/* Devices and contexts: listing, opening, closing, taking asynchronous events, fork. query.c has the query verbs. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "system/answer.h"
#include "verbs/entry.h"

#define COMMAND_FILE "softrnic-command"

/* Before each list that we return: what the real library gave, so that it can have it back. */
struct list_header {
    struct ibv_device **real;
    struct ibv_device *devices[];
};

static struct srn_device *srn_device(struct ibv_device *device) {
    return srn_container(device, struct srn_device, ib);
}

/* srn_global.lock held. Fills the device table from srn_global.config. */
static void devices_init(void) {
    for (int i = 0; i < srn_global.config.device_count; i++) {
        struct srn_device *d = &srn_global.devices[i];
        char name[CONFIG_DEVICE_LEN];

        _Static_assert(CONFIG_DEVICE_LEN <= sizeof(d->ib.name), "a device's name fits");
        memcpy(name, srn_global.config.devices[i].name, sizeof(name));
        memset(&d->ib, 0, sizeof(d->ib));
        d->config = &srn_global.config.devices[i];
        d->ib.node_type = IBV_NODE_CA;
        d->ib.transport_type = IBV_TRANSPORT_IB;
        snprintf(d->ib.name, sizeof(d->ib.name), "%s", name);
        snprintf(d->ib.dev_name, sizeof(d->ib.dev_name), "uverbs_soft%d", d->config->rail);
        snprintf(d->ib.dev_path, sizeof(d->ib.dev_path), "/sys/class/infiniband_verbs/uverbs_soft%d",
                 d->config->rail);
        /* Where nobody would answer, a device of the system's may have this name. */
        snprintf(d->ib.ibdev_path, sizeof(d->ib.ibdev_path), "%s/%s",
                 system_is_asked() ? "/sys/class/infiniband" : "/nonexistent/softrnic", name);
        d->guid = srn_guid_make(srn_global.config.host, d->config->rail);
    }
}

/* srn_global.lock held. */
static void config_once(void) {
    if (srn_global.config.device_count)
        return;
    config_load(&srn_global.config);
    devices_init();
}

/* Is this the name of a device of ours? The system's device of that name cannot be opened then. */
static bool name_is_ours(const char *name) {
    for (int i = 0; i < srn_global.config.device_count; i++)
        if (strcmp(srn_global.devices[i].ib.name, name) == 0)
            return true;
    return false;
}

SRN_EXPORT struct ibv_device **ibv_get_device_list(int *num_devices) {
    int real_count = 0, ours, count, saved;
    struct list_header *header;
    __typeof__(&ibv_get_device_list) real = SRN_REAL(ibv_get_device_list);
    struct ibv_device **real_list;

    pthread_mutex_lock(&srn_global.lock);
    config_once();
    ours = srn_global.config.device_count;
    pthread_mutex_unlock(&srn_global.lock);

    real_list = real ? real(&real_count) : NULL;
    saved = errno;
    if (!ours && !real_list) {
        if (num_devices)
            *num_devices = 0;
        errno = real ? saved : ENOSYS;
        return NULL;
    }
    if (!real_list)
        real_count = 0;
    header = calloc(1, sizeof(*header) + (size_t)(ours + real_count + 1) * sizeof(struct ibv_device *));
    if (!header) {
        if (real_list)
            SRN_REAL(ibv_free_device_list)(real_list);
        errno = ENOMEM;
        return NULL;
    }
    header->real = real_list;
    for (count = 0; count < ours; count++)
        header->devices[count] = &srn_global.devices[count].ib;
    for (int i = 0; i < real_count; i++)
        if (!name_is_ours(real_list[i]->name))
            header->devices[count++] = real_list[i];
    if (num_devices)
        *num_devices = count;
    return header->devices;
}

SRN_EXPORT void ibv_free_device_list(struct ibv_device **list) {
    if (!list)
        return;

    struct list_header *header = srn_container(list, struct list_header, devices);
    if (header->real)
        SRN_REAL(ibv_free_device_list)(header->real);
    free(header);
}

SRN_EXPORT const char *ibv_get_device_name(struct ibv_device *device) {
    return srn_device_is_ours(device) ? device->name : SRN_PASS(ibv_get_device_name, NULL, device);
}

SRN_EXPORT int ibv_get_device_index(struct ibv_device *device) {
    return srn_device_is_ours(device) ? (int)(srn_device(device) - srn_global.devices)
                                      : SRN_PASS(ibv_get_device_index, -1, device);
}

SRN_EXPORT __be64 ibv_get_device_guid(struct ibv_device *device) {
    return srn_device_is_ours(device) ? srn_device(device)->guid : SRN_PASS(ibv_get_device_guid, 0, device);
}

/* --- NICs --- */

/* srn_global.lock held. 0 or errno. */
static int nic_open(struct srn_device *dev, struct srn_nic **out) {
    struct srn_nic *nic = calloc(1, sizeof(*nic));
    char err[256] = "";
    int rc;

    if (!nic)
        return ENOMEM;
    nic->dev = dev;
    nic->null_mode = dev->config->kind == CONFIG_NULL;
    pthread_mutex_init(&nic->lock, NULL);
    srn_list_init(&nic->contexts);
    srn_list_init(&nic->ack_list);
    srn_list_init(&nic->timed);
    srn_list_init(&nic->held);
    pthread_mutex_init(&nic->command_lock, NULL);
    pthread_cond_init(&nic->command_cond, NULL);
    nic->mr_free = UINT32_MAX;
    /* Keys and QPNs start anywhere: a key of one NIC must not happen to be valid on another. */
    nic->key_base = (uint32_t)srn_random() & 0x7fffff;
    nic->next_qpn = (uint32_t)srn_random() & WIRE_QPN_MASK;
    rc = srn_net_open(nic, err, sizeof(err));
    if (rc) {
        /* Said once, not at every attempt of a program that waits for its NIC to come back. */
        if (rc != dev->last_error)
            fprintf(stderr, "softrnic: host %s: %s\n", srn_global.config.host, err[0] ? err : strerror(rc));
        dev->last_error = rc;
        srn_nic_free(nic);
        return rc;
    }
    srn_gids_init(nic);
    dev->last_error = 0;
    srn_list_add_tail(&srn_global.nics, &nic->link);
    *out = nic;
    return 0;
}

static void fork_prepare(void) {
    pthread_mutex_lock(&srn_global.lock);
}

static void fork_parent(void) {
    pthread_mutex_unlock(&srn_global.lock);
}

/*
 * The child has no progress thread and must not use the parent's socket: everything made before is dead in
 * it, verbs on it fail with EIO and destroying it is quiet. It may open devices anew.
 */
static void fork_child(void) {
    struct srn_list *pos, *tmp;

    srn_for_each(pos, tmp, &srn_global.nics) {
        struct srn_nic *nic = srn_container(pos, struct srn_nic, link);

        atomic_store(&nic->forked, true);
        nic->dev->nic = NULL;
        srn_net_after_fork(nic);
        srn_list_del(&nic->link);
    }
    pthread_mutex_init(&srn_global.lock, NULL);
    srn_atomics_after_fork();
}

__attribute__((destructor)) static void at_exit(void) {
    struct srn_list *pos, *tmp;

    if (pthread_mutex_trylock(&srn_global.lock))
        return;
    srn_for_each(pos, tmp, &srn_global.nics) srn_net_at_exit(srn_container(pos, struct srn_nic, link));
    pthread_mutex_unlock(&srn_global.lock);
}

static void process_once(void) {
    Dl_info info;

    pthread_atfork(fork_prepare, fork_parent, fork_child);
    /* A progress thread must never lose its code to a dlclose(). */
    if (dladdr((void *)process_once, &info) && info.dli_fname)
        dlopen(info.dli_fname, RTLD_NOW | RTLD_NODELETE | RTLD_NOLOAD);
}

/* --- contexts --- */

static int query_port_ex(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr,
                         size_t len) {
    struct ibv_port_attr full;
    int rc = srn_query_port(context, port_num, &full);

    if (rc)
        return rc;
    memset(attr, 0, len);
    memcpy(attr, &full, len < sizeof(full) ? len : sizeof(full));
    return 0;
}

/* There is no kernel to give commands to, but programs may pass the descriptor on. */
static int command_fd(void) {
    return memfd_create(COMMAND_FILE, MFD_CLOEXEC);
}

static void context_ops(struct srn_ctx *ctx) {
    struct verbs_context *v = &ctx->verbs;
    bool null_mode = ctx->nic->null_mode;

    v->sz = sizeof(*v);
    v->query_port = query_port_ex;
    v->query_device_ex = srn_query_device_ex;
    v->create_qp_ex = srn_create_qp_ex;
    v->create_cq_ex = srn_create_cq_ex;
    v->alloc_parent_domain = srn_alloc_parent_domain;
    v->alloc_td = srn_alloc_td;
    v->dealloc_td = srn_dealloc_td;
    v->context.ops.alloc_mw = srn_alloc_mw;
    v->context.ops.dealloc_mw = srn_dealloc_mw;
    v->context.ops.bind_mw = srn_bind_mw;
    v->context.ops.post_srq_recv = srn_post_srq_recv;
    v->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    v->context.ops.poll_cq = srn_poll_cq;
    v->context.ops.req_notify_cq = srn_req_notify_cq;
    v->context.ops.post_send = null_mode ? srn_null_post_send : srn_post_send;
    v->context.ops.post_recv = null_mode ? srn_null_post_recv : srn_post_recv;
}

SRN_EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct srn_device *dev;
    struct srn_ctx *ctx;
    int rc;

    if (!srn_device_is_ours(device))
        return SRN_PASS(ibv_open_device, NULL, device);
    pthread_once(&once, process_once);
    dev = srn_device(device);
    ctx = calloc(1, sizeof(*ctx));
    if (!ctx) {
        errno = ENOMEM;
        return NULL;
    }
    rc = srn_evq_init(&ctx->async);
    if (rc) {
        free(ctx);
        errno = rc;
        return NULL;
    }
    pthread_mutex_lock(&srn_global.lock);
    /* A killed NIC stays dead for those who have it open; who opens the device now gets a new one, or is
     * told. */
    if (dev->nic && (atomic_load(&dev->nic->dead) || (dev->nic->port && fault_is_dead(dev->nic->port))))
        dev->nic = NULL;
    if (!dev->nic)
        rc = nic_open(dev, &dev->nic);
    if (!rc) {
        ctx->nic = dev->nic;
        ctx->nic->opens++;
        atomic_fetch_add(&ctx->nic->refs, 1);
        atomic_init(&ctx->refs, 1);
        ctx->verbs.context.device = device;
        ctx->verbs.context.cmd_fd = command_fd();
        ctx->verbs.context.async_fd = ctx->async.fd;
        ctx->verbs.context.num_comp_vectors = 1;
        pthread_mutex_init(&ctx->verbs.context.mutex, NULL);
        context_ops(ctx);
        srn_nic_lock(ctx->nic);
        srn_list_add_tail(&ctx->nic->contexts, &ctx->link);
        srn_nic_unlock(ctx->nic);
    }
    pthread_mutex_unlock(&srn_global.lock);
    if (rc) {
        srn_evq_close(&ctx->async, false);
        free(ctx);
        errno = rc;
        return NULL;
    }
    return &ctx->verbs.context;
}

/*
 * A context may be closed before what was made on it, as a garbage collector does it. Those objects live on as if the
 * NIC had been killed, until they are destroyed.
 */
SRN_EXPORT int ibv_close_device(struct ibv_context *context) {
    struct srn_ctx *ctx;
    struct srn_nic *nic;
    bool last = false;

    if (!srn_is_ours(context))
        return SRN_PASS(ibv_close_device, -1, context);
    ctx = srn_ctx(context);
    nic = ctx->nic;
    if (!srn_forked(nic)) {
        pthread_mutex_lock(&srn_global.lock);
        srn_nic_lock(nic);
        srn_list_del(&ctx->link);
        srn_nic_unlock(nic);
        last = --nic->opens == 0;
        if (last) {
            if (nic->dev->nic == nic)
                nic->dev->nic = NULL;
            srn_list_del(&nic->link);
        }
        pthread_mutex_unlock(&srn_global.lock);
    }
    if (last) {
        atomic_store(&nic->dead, true);
        srn_net_close(nic);
        srn_counters_print(nic);
    }
    srn_evq_close(&ctx->async, srn_forked(nic));
    if (context->cmd_fd >= 0)
        close(context->cmd_fd);
    srn_ctx_put(ctx);
    return 0;
}

SRN_EXPORT struct ibv_context *ibv_import_device(int cmd_fd) {
    char link[64], target[64] = "";

    snprintf(link, sizeof(link), "/proc/self/fd/%d", cmd_fd);
    if (readlink(link, target, sizeof(target) - 1) > 0 && strstr(target, COMMAND_FILE)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return SRN_PASS(ibv_import_device, NULL, cmd_fd);
}

/* --- asynchronous events --- */

SRN_EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
    struct srn_ctx *ctx;
    struct srn_event e;

    if (!srn_is_ours(context))
        return SRN_PASS(ibv_get_async_event, -1, context, event);
    ctx = srn_ctx(context);
    if (srn_forked(ctx->nic)) {
        errno = EIO;
        return -1;
    }
    if (srn_evq_pop(&ctx->async, &e))
        return -1;
    *event = e.async;
    return 0;
}

SRN_EXPORT void ibv_ack_async_event(struct ibv_async_event *event) {
    pthread_mutex_t *mutex;
    pthread_cond_t *cond;
    uint32_t *completed;

    switch (event->event_type) {
    case IBV_EVENT_CQ_ERR:
        if (!srn_is_ours(event->element.cq->context))
            break;
        mutex = &event->element.cq->mutex;
        cond = &event->element.cq->cond;
        completed = &event->element.cq->async_events_completed;
        goto ack;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        if (!srn_is_ours(event->element.qp->context))
            break;
        mutex = &event->element.qp->mutex;
        cond = &event->element.qp->cond;
        completed = &event->element.qp->events_completed;
        goto ack;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
        if (!srn_is_ours(event->element.srq->context))
            break;
        mutex = &event->element.srq->mutex;
        cond = &event->element.srq->cond;
        completed = &event->element.srq->events_completed;
        goto ack;
    case IBV_EVENT_WQ_FATAL:
        break;
    default:
        return; /* port and device events need no acknowledgement */
    }
    if (SRN_REAL(ibv_ack_async_event))
        SRN_REAL(ibv_ack_async_event)(event);
    return;

ack:
    pthread_mutex_lock(mutex);
    ++*completed;
    pthread_cond_broadcast(cond);
    pthread_mutex_unlock(mutex);
}
