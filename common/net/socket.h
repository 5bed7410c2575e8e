/*
 * What both ends' ZeroMQ sockets have in common. Internal to common/net. A socket belongs to one
 * thread; handing it to another needs a full fence (thread creation and join are such).
 */
#ifndef SL_NET_SOCKET_H
#define SL_NET_SOCKET_H

#include <zmq.h>

#include "common/base/status.h"
#include "common/wire/messages.h"

/* A socket with bounded queues, linger and message size, whose connections the kernel probes, so
 * that a host that is gone is noticed (which says nothing of the engine behind). `type` is
 * ZMQ_ROUTER or ZMQ_DEALER. `name` is for error texts. */
SL_MUST_USE sl_status_t sl_socket_open(void *context, int type, const char *name,
                                       const sl_wire_limits_t *limits, void **socket_p);

SL_MUST_USE sl_status_t sl_socket_set(void *socket, const char *name, int option, int value);

/* Receives one part without blocking, SL_ERR_AGAIN if there is none; *message must be initialised.
 * *more_p says whether the same message has more parts. */
SL_MUST_USE sl_status_t sl_socket_receive(void *socket, const char *name, zmq_msg_t *message,
                                          bool *more_p);

/* Reads the parts that follow and drops them; returns how many. */
size_t sl_socket_drop_parts(void *socket);

/* Sends one part without blocking. The bytes are copied, and stay the caller's. SL_ERR_AGAIN: no
 * room now. SL_ERR_UNREACHABLE: a ROUTER knows no such peer (not logged: the caller knows whom). */
SL_MUST_USE sl_status_t sl_socket_send(void *socket, const char *name, const void *data,
                                       size_t size, int flags);

#endif
