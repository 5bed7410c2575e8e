/*
 * Bytes that the ranks exchange over UCX outside of the latent pages themselves: the addresses that
 * travel through the router, and the messages: grant, commit, release,
 * bye, and those that carry pages where UCX cannot put them (transfer_data.c). Fixed fields,
 * little-endian, in the order of the structs; nothing of C's layout reaches the wire. Parsing
 * checks every size and count against the bytes at hand before use and never allocates.
 *
 * Pure functions: any thread, never block. Parsed structs borrow from the bytes they were read
 * from. Errors are SL_ERR_INVALID with field, expected and found; they are logged at debug level
 * only, so callers say whom the bytes came from.
 */
#ifndef SL_TRANSFER_TRANSFER_WIRE_H
#define SL_TRANSFER_TRANSFER_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/transfer/transfer.h"

/* ---- addresses: magic, version, fields, opaque UCX bytes, checksum over all before it ---- */

/* Worker addresses and keys are some hundred bytes; this is the limit for each. */
#define SL_TRANSFER_OPAQUE_BYTES_MAX 65536

typedef struct {
    uint32_t rank, size; /* the place in the group */
    const uint8_t *worker_address;
    uint32_t worker_address_bytes;
} sl_group_blob_t;

SL_MUST_USE sl_status_t sl_group_blob_encode(const sl_group_blob_t *blob, sl_bytes_t *bytes_p);
SL_MUST_USE sl_status_t sl_group_blob_parse(const uint8_t *data, size_t size,
                                            sl_group_blob_t *blob_p);

typedef struct {
    sl_rank_id_t rank;
    uint64_t layout_hash;
    uint64_t pool_base; /* address of page 0 in the owner's memory */
    uint64_t page_bytes;
    uint32_t layers;
    uint32_t page_count;
    bool device_memory; /* the pool is a GPU's */
    const uint8_t *worker_address;
    uint32_t worker_address_bytes;
    const uint8_t *rkey; /* packed remote key of the pool */
    uint32_t rkey_bytes;
} sl_transfer_blob_t;

SL_MUST_USE sl_status_t sl_transfer_blob_encode(const sl_transfer_blob_t *blob,
                                                sl_bytes_t *bytes_p);
SL_MUST_USE sl_status_t sl_transfer_blob_parse(const uint8_t *data, size_t size,
                                               sl_transfer_blob_t *blob_p);

/* ---- messages between two transfer threads ---- */

typedef enum {
    SL_TRANSFER_MSG_GRANT = 1,
    SL_TRANSFER_MSG_COMMIT = 2,
    SL_TRANSFER_MSG_RELEASE = 3,
    SL_TRANSFER_MSG_BYE = 4,  /* the sender closes its endpoint; attempt and generation are 0 */
    SL_TRANSFER_MSG_DATA = 5, /* the header of a piece of a page; the piece travels beside it */
    SL_TRANSFER_MSG_DATA_SEEN = 6,
} sl_transfer_msg_type_t;

/* Where the bytes of a DATA message belong. */
typedef struct {
    bool to_granter; /* the receiver holds the grant; otherwise another rank of its group does */
    uint32_t index;  /* of the page within the grant */
    uint32_t page;   /* in the receiver's pool */
    uint64_t offset; /* within the page */
} sl_data_place_t;

typedef struct {
    sl_transfer_msg_type_t type;
    sl_rank_id_t from; /* the sender */
    uint64_t attempt;
    uint32_t generation;
    uint64_t layout_hash;
    sl_commit_t commit;        /* COMMIT; zero otherwise */
    sl_data_place_t data;      /* DATA */
    uint64_t seen;             /* DATA_SEEN: DATA messages of the receiver copied so far */
    uint32_t page_count;       /* GRANT; zero otherwise */
    const uint8_t *page_bytes; /* GRANT: page_count little-endian u32, read by sl_..._page() */
} sl_transfer_msg_t;

#define SL_TRANSFER_GRANT_PAGES_MAX (1u << 20)

/* Grants take their pages from `pages`; `pages` is ignored for the other types. */
SL_MUST_USE sl_status_t sl_transfer_msg_encode(const sl_transfer_msg_t *msg, const uint32_t *pages,
                                               sl_bytes_t *bytes_p);
SL_MUST_USE sl_status_t sl_transfer_msg_parse(const uint8_t *data, size_t size,
                                              sl_transfer_msg_t *msg_p);
uint32_t sl_transfer_msg_page(const sl_transfer_msg_t *msg, uint32_t index);

#endif
