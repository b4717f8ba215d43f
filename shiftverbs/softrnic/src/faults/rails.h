/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The rails' fabric as all processes share it: what fabric/port.h computes, in the registry's file. A port has a lock of
 * its own, for no longer than that takes. What is asked here concerns a device whose fault_filter() says FAULT_CARRY.
 */
#ifndef SOFTRNIC_RAILS_H
#define SOFTRNIC_RAILS_H

#include "fabric/port.h"
#include "faults/fault.h"

/* Has any port of the device's rail limits? */
bool rails_limited(const struct fault_port *port);

/* When the last bit of a packet of len bytes of UDP payload, sent now by this device's host, is in the switch. */
uint64_t rails_send(const struct fault_port *port, uint64_t now_ns, size_t len);

/* It is there, on its way to this address. fate.out_ns is when it arrives there. */
struct fabric_fate rails_forward(const struct fault_port *port, uint32_t peer_ip, uint64_t now_ns,
                                 size_t len);

#endif
