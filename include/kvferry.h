/*
 * kvferry: moves KV-cache blocks between the processes of LLM inference engines, on UCX.
 * This file is generated from src/ffi. Do not edit it.
 *
 * Errors. A call returns KVF_OK (0) or a negative kvf_code. Results go to out-parameters, which are written only on
 * success. kvf_last_error gives the text of the calling thread's last failed call: what was wrong, what was expected and
 * what to do. Nothing a caller passes ends the process, except a pointer that is not null and yet not valid.
 *
 * Objects. kvf_agent, kvf_listener, kvf_worker, kvf_scheduler and kvf_aggregator are made by kvf_*_start and freed
 * by kvf_*_free. Their pointers are handles that are looked up and never followed: one that is NULL, freed, foreign or
 * of another kind gives KVF_INVALID_ARGUMENT or KVF_NOT_FOUND. An object that a fork has copied into another
 * process gives KVF_SHUT_DOWN there, and a new agent or worker is KVF_UNSUPPORTED there if the first process had one at
 * the fork: start processes by spawn. Regions, peers and transfers are ids that are never used twice.
 *
 * Threads. Any function may be called from any thread at any time, also on one object at once, where the function
 * does not say otherwise. No function waits for the network or for a transfer, except those that take a timeout and
 * those that say so.
 *
 * Memory. What a caller passes is read (or copied) before the call returns, except memory that it registers. A
 * kvf_buffer that a call fills belongs to the library until kvf_buffer_free. A pair of pointer and length may be NULL
 * with length 0. Text is UTF-8, passed with its length in bytes and without a NUL.
 *
 * Data. Configuration, params and statistics are msgpack maps with text keys; an unknown key, a missing one or a value
 * of the wrong type is KVF_INVALID_ARGUMENT, and the text names the key. Metadata, steps and reports are opaque bytes
 * with a version.
 */


#ifndef KVFERRY_H
#define KVFERRY_H

#include <stddef.h>
#include <stdint.h>

/* The ABI that this header describes; kvf_abi_version() must return it. */
#define KVF_ABI_VERSION 1

/* The release that this header belongs to; kvf_version() says which library is there at run time. */
#define KVF_VERSION "0.1.0"


// The status of a call: KVF_OK or the kind of error. A number is never changed or used again for another
// kind; later releases may add some.
enum kvf_code
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Success.
  KVF_OK = 0,
  // An argument is malformed: null, empty, of the wrong type or length, or contradicts another.
  KVF_INVALID_ARGUMENT = -1,
  // The named thing is not known, or not any more (a stale id or handle).
  KVF_NOT_FOUND = -2,
  // The thing exists already (an overlapping registration, a rank pushed twice with other contents).
  KVF_ALREADY_EXISTS = -3,
  // A block id, offset or length lies outside its region.
  KVF_OUT_OF_RANGE = -4,
  // Two engines cannot exchange KV caches: some named field differs.
  KVF_INCOMPATIBLE = -5,
  // The installed UCX, CUDA driver or this build cannot do it.
  KVF_UNSUPPORTED = -6,
  // Bytes from outside do not decode: truncated, damaged, or not kvferry's.
  KVF_CORRUPT = -7,
  // Bytes from outside are of a protocol version that this build does not speak.
  KVF_VERSION_MISMATCH = -8,
  // The other side could not be reached.
  KVF_UNREACHABLE = -9,
  // The other side died, restarted, or broke the connection.
  KVF_PEER_DIED = -10,
  // A stated time ran out.
  KVF_TIMEOUT = -11,
  // The caller cancelled it.
  KVF_CANCELLED = -12,
  // The port or address cannot be bound.
  KVF_ADDRESS_IN_USE = -13,
  // No usable UCX was found at run time.
  KVF_UCX_MISSING = -14,
  // UCX refused or failed an operation.
  KVF_UCX = -15,
  // The CUDA driver refused or failed a call, or is absent.
  KVF_CUDA = -16,
  // The object is shut down.
  KVF_SHUT_DOWN = -17,
  // A bound is reached (queue, table, message size); try again later or raise the bound.
  KVF_EXHAUSTED = -18,
  // The operating system refused a call.
  KVF_IO = -19,
  // A bug in kvferry: a panic was caught at the boundary.
  KVF_INTERNAL = -20,
  // The producer's lease on the blocks had run out, so what was read may be wrong.
  KVF_LEASE_EXPIRED = -21,
  // The bytes that arrived are not those that the producer has: the fabric, a driver or the memory damaged them, or
  // the producer changed them meanwhile.
  KVF_DIGEST_MISMATCH = -22,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvf_code kvf_code;
#else
typedef int32_t kvf_code;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Where registered bytes live.
enum kvf_memory_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Ordinary process memory.
  KVF_MEMORY_HOST = 0,
  // Memory of a CUDA device.
  KVF_MEMORY_CUDA = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvf_memory_kind kvf_memory_kind;
#else
typedef uint32_t kvf_memory_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Which way a transfer moves bytes.
enum kvf_direction
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // From the peer's regions into ours.
  KVF_READ = 0,
  // From our regions into the peer's.
  KVF_WRITE = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvf_direction kvf_direction;
#else
typedef uint32_t kvf_direction;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The kind of a kvf_event.
enum kvf_event_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // A transfer is over, and touches no memory any more. Each transfer gets exactly one. `status` is KVF_OK when every
  // byte was moved; otherwise the payload is the error's text.
  KVF_EVENT_TRANSFER_DONE = 1,
  // A message arrived; the payload is its bytes.
  KVF_EVENT_MESSAGE = 2,
  // The peer said hello; the payload is its name. Also comes, with a new peer id, on the side that was connected to.
  KVF_EVENT_PEER_CONNECTED = 3,
  // The peer is gone and its id dead; `status` and the payload, a text, say why.
  KVF_EVENT_PEER_LOST = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvf_event_kind kvf_event_kind;
#else
typedef uint32_t kvf_event_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// How a request ended.
enum kvf_outcome
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // By its length or a stop.
  KVF_COMPLETE = 0,
  // In any other way.
  KVF_ABORTED = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvf_outcome kvf_outcome;
#else
typedef uint32_t kvf_outcome;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Which of a request's two sides reports are about.
enum kvf_side
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // The producer's blocks being read.
  KVF_SENDING = 0,
  // The consumer's blocks being filled.
  KVF_RECVING = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvf_side kvf_side;
#else
typedef uint32_t kvf_side;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A transfer engine. Opaque.
typedef struct kvf_agent kvf_agent;

// An aggregator. Opaque.
typedef struct kvf_aggregator kvf_aggregator;

// A handshake listener. Opaque.
typedef struct kvf_listener kvf_listener;

// One engine's scheduler side. Opaque.
typedef struct kvf_scheduler kvf_scheduler;

// One rank's worker. Opaque.
typedef struct kvf_worker kvf_worker;

// A byte string made by the library. Read `len` bytes at `data`, change nothing, and give it back with
// `kvf_buffer_free`. An empty one has `data` NULL.
typedef struct kvf_buffer {
  // The bytes.
  const uint8_t *data;
  // How many.
  size_t len;
  // Tells this buffer from every other.
  uint64_t id;
} kvf_buffer;

// Gets one log line. `level` is 1 (error), 2 (warn), 3 (info), 4 (debug) or 5 (trace); `target` names the module,
// such as "kvferry::agent". Both strings end with the call.
//
// It may come from any thread, also from several at once, and that thread does nothing else until it returns. It must return:
// a C++ exception or the end of its thread ends the process. It may call kvf_last_error, kvf_status_name and the versions;
// every other function gives KVF_INVALID_ARGUMENT on its thread, and lines that it causes itself are dropped.
typedef void (*kvf_log_callback)(uint32_t level, const char *target, const char *message, void *user);

// Something that happened. Fields that a kind does not use are 0.
typedef struct kvf_event {
  // A kvf_event_kind. A program ignores the kinds that it does not know.
  uint32_t kind;
  // A kvf_code.
  int32_t status;
  // The peer.
  uint64_t peer;
  // The transfer.
  uint64_t transfer;
  // The caller's number for the transfer.
  uint64_t user_data;
  // Bytes whose operations succeeded.
  uint64_t bytes;
  // UCX operations posted.
  uint64_t operations;
  // From the first posted operation to the last ended one, in microseconds.
  uint64_t duration_us;
  // The peer's incarnation.
  uint64_t incarnation;
  // Names the event's bytes for kvf_agent_recv; 0 when it has none.
  uint64_t payload;
  // How many bytes.
  uint64_t payload_len;
} kvf_event;

// A run of bytes that repeats at every block of one pair of lists. Block `i` of list `list` moves `length` bytes
// between `local_offset + local_ids[i] * local_stride` in the local region and `remote_offset + remote_ids[i] *
// remote_stride` in the remote one. Offsets, strides and length are in bytes.
typedef struct kvf_segment {
  // Which pair of block lists.
  uint32_t list;
  // Local region, by its index.
  uint32_t local_region;
  // Remote region, by its index.
  uint32_t remote_region;
  // From the local region's first byte to that of block 0.
  uint64_t local_offset;
  // From the remote region's first byte to that of block 0.
  uint64_t remote_offset;
  // From a local block to the next.
  uint64_t local_stride;
  // From a remote block to the next.
  uint64_t remote_stride;
  // Moved per block.
  uint64_t length;
} kvf_segment;

// The beginning of memory in which a worker leaves reports; the report is behind it. Read and write the flags atomically, the
// one with acquire, the other with release ordering.
typedef struct kvf_outbox {
  // 1 while a report waits here. Set it to 0 when you have read the report, and the next one will be left here.
  uint8_t full;
  // Not 0 when there is a report elsewhere. It was too long for this memory, or came while it was full. Then
  // kvf_worker_poll gives everything, with what waits here.
  uint8_t more;
  // Not used.
  uint8_t reserved[6];
  // The report's length in bytes.
  uint64_t len;
} kvf_outbox;

// One rank's encoded metadata.
typedef struct kvf_rank_metadata {
  // Pipeline-parallel rank.
  uint32_t pp_rank;
  // Tensor-parallel rank.
  uint32_t tp_rank;
  // The bytes of kvf_worker_metadata.
  const uint8_t *data;
  // How many.
  size_t len;
} kvf_rank_metadata;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Gives the name of a status in lower case without the prefix, such as "not_found". It is "ok" for KVF_OK and
// "unknown" for a number that this release does not have. The string lives as long as the process.
const char *kvf_status_name(int32_t status);

// Copies the text of the calling thread's last failed call to `out`. At most `cap - 1` bytes and a NUL, cut between
// characters. `*len` becomes the whole text's length without the NUL, so that a caller can come back with more room;
// `len` may be NULL. `out` may be NULL when `cap` is 0. The text stays until the thread's next failed call; this
// function itself leaves it as it is.
int32_t kvf_last_error(char *out,
                       size_t cap,
                       size_t *len);

// The library's version, such as "0.1.0". The string lives as long as the process.
const char *kvf_version(void);

// Gives the newest protocol version that this library speaks ("Versions" in docs/protocol.md).
uint32_t kvf_protocol_version(void);

// The oldest protocol version that this library speaks to other engines.
uint32_t kvf_protocol_oldest(void);

// Gives the number of the C ABI. A program checks that it is the KVF_ABI_VERSION that it was compiled with.
uint32_t kvf_abi_version(void);

// Opens the UCX that agents of this process use, and tells which it is. `*out` is a msgpack map of path, version and
// source (how it was found). `ucx_lib` is the path of a libucp, or NULL with length 0 to have one found. A process
// has one UCX: another path than the one in use is KVF_INVALID_ARGUMENT. Without a usable one it is KVF_UCX_MISSING,
// and the text says where it was searched for and how to get one.
int32_t kvf_ucx_info(const char *ucx_lib,
                     size_t ucx_lib_len,
                     struct kvf_buffer *out);

// Tells the search for a UCX where a Python package kvferry-ucx or libucx lies. `path` is that of its libucp.so.0,
// where only the host's own module path leads to it. The searches from now on try it after those of the same package
// that they find by themselves. The last path for either package counts. Opens nothing.
int32_t kvf_ucx_hint(const char *path,
                     size_t path_len);

// Lists every libucp that the search for a UCX comes by, in its order. `*out` is a msgpack map with candidates, a
// list of maps with path, source (how the search came by it), fate ("chosen", "refused" or "not_tried": the search
// had ended), version (str or nil) and why (str or nil: the reason of a refusal). Opens the chosen one as
// kvf_ucx_info does; that none is usable is no error here. `ucx_lib` as there. Where this process has opened a UCX
// already, the answer is that of the search which found it.
int32_t kvf_ucx_candidates(const char *ucx_lib,
                           size_t ucx_lib_len,
                           struct kvf_buffer *out);

// Tells what an agent of `config` (as in kvf_agent_start) would use: a msgpack map with ucx (as of kvf_ucx_info),
// resources (list of maps with transport and device, both in UCX's words), devices (list of maps with name, addresses (list
// of str), is_used, repeats (whether other hosts may have the same addresses) and why: the network devices), moves_cuda (bool), unknown_variables (list of
// maps with name and similar: variables UCX_* of the environment that this UCX does not know, and names that differ by a
// slip) and others (paths of other libucp files that are loaded in this process). Opens UCX and makes and frees a context;
// errors as of kvf_agent_start.
int32_t kvf_ucx_outlook(const uint8_t *config,
                        size_t config_len,
                        struct kvf_buffer *out);

// Gives a buffer back and empties `*buffer`. Freeing it again, or freeing an empty one, does nothing; freeing a second
// copy of the struct is KVF_NOT_FOUND. Of a buffer that a fork has copied only `*buffer` is emptied.
int32_t kvf_buffer_free(struct kvf_buffer *buffer);

// Sets a callback for log lines up to `max_level` (1 error to 5 trace, 0 none). `user` is passed to each call.
// Replaces a callback set before: when this returns, that one is not running and is not called any more. Without a
// callback, lines up to the level that the environment variable KVFERRY_LOG names (off, error, warn, info, debug,
// trace; default warn) go to standard error.
int32_t kvf_log_set(kvf_log_callback callback,
                    void *user,
                    uint32_t max_level);

// Removes the callback. When this returns, it is not running and is not called any more. Lines go to standard error
// as KVFERRY_LOG says, as before kvf_log_set.
int32_t kvf_log_unset(void);

// Starts an agent: opens UCX and starts the thread that owns it.
//
// `config` is a msgpack map, or NULL with length 0 for the defaults, with the keys for an agent that
// kvf_settings_describe tells and docs/configuration.md lists.
int32_t kvf_agent_start(const uint8_t *config, size_t config_len, struct kvf_agent **out);

// Registers `len` bytes at `addr`. Transfers can then name them, and peers can read and write them. `kind` is a
// kvf_memory_kind, `device` the ordinal of the CUDA device (0 for host memory). `*region` names the registration,
// `*index` is what segments on both sides call it. Ranges may overlap: each is a region of its own. Waits for the
// registration, which pins the memory.
//
// The memory must stay allocated until kvf_agent_deregister, kvf_agent_shutdown or kvf_agent_free has returned KVF_OK.
int32_t kvf_agent_register(struct kvf_agent *agent,
                           void *addr,
                           uint64_t len,
                           uint32_t kind,
                           uint32_t device,
                           uint64_t *region,
                           uint32_t *index);

// Deregisters a region; when this returns KVF_OK nothing touches its memory. New transfers with it are refused,
// those that use it are cancelled, and peers on this host that copy by themselves are waited for, also those that
// leave. A peer whose process stands still is not waited for longer than cancel_grace_ms, and may end a copy that it
// has begun when it goes on; one that this side has disconnected is not asked: deregister first. KVF_TIMEOUT when
// transfers, or copies that peers make, have not ended in time: then the memory must stay allocated, and a later
// call waits again.
int32_t kvf_agent_deregister(struct kvf_agent *agent,
                             uint64_t region);

// Gives the metadata with which another agent connects to this one. It reaches the regions registered so far.
int32_t kvf_agent_metadata(struct kvf_agent *agent, struct kvf_buffer *out);

// Gives the metadata of one region, for peers that have connected already. Its size does not depend on other
// regions. The peer passes it to kvf_agent_add_region.
int32_t kvf_agent_region_metadata(struct kvf_agent *agent, uint64_t region, struct kvf_buffer *out);

// Makes a peer's region known that was registered after its metadata was made. The metadata is that of
// kvf_agent_connect. `metadata` is of the peer's kvf_agent_region_metadata; `*index` becomes what segments call the
// region. Passing the same again does nothing; other metadata of a region that is known is KVF_CORRUPT, because an
// index names one region for ever. Metadata of another life of the peer is KVF_PEER_DIED. A later kvf_agent_connect
// with metadata that lists regions but not this one takes it away again; metadata that lists no region takes none
// away.
int32_t kvf_agent_add_region(struct kvf_agent *agent,
                             uint64_t peer,
                             const uint8_t *metadata,
                             size_t metadata_len,
                             uint32_t *index);

// Forgets a region of a peer's, by its index. New transfers with it end with KVF_NOT_FOUND; those that have begun go
// on, and what this side holds of the region (its key, a mapping) is released when the last of them has ended.
// kvf_agent_add_region makes it known again. A region that is not known is KVF_NOT_FOUND.
int32_t kvf_agent_remove_region(struct kvf_agent *agent,
                                uint64_t peer,
                                uint32_t region);

// Connects to the agent that made `metadata`. Returns before the peer has answered: transfers and messages may be
// started at once; KVF_EVENT_PEER_CONNECTED or KVF_EVENT_PEER_LOST follows.
int32_t kvf_agent_connect(struct kvf_agent *agent,
                          const uint8_t *metadata,
                          size_t metadata_len,
                          uint64_t *peer);

// Ends a connection; its id is invalid at once. Its transfers are cancelled, and messages not sent yet are lost.
int32_t kvf_agent_disconnect(struct kvf_agent *agent,
                             uint64_t peer);

// Tells over which transports and data paths bytes go between this agent and a peer. `*out` is a msgpack map with
// connected (bool: whether the peer has answered; what follows is empty before), lanes (transports and devices of
// the connection, in UCX's words), and the names of the paths of long runs: host (between host memories), device
// (between CUDA devices) and mixed (between the two).
int32_t kvf_agent_route(struct kvf_agent *agent,
                        uint64_t peer,
                        struct kvf_buffer *out);

// Gives the figures of each peer since the start: a msgpack map whose peers is a list of
// maps with name, connected (1 or 0), lanes, host, device and mixed (as of kvf_agent_route, empty while not connected), and
// the counters that kvf_stats_metrics has under the scope "peer". Connections to agents of one name count together, also
// those that are over; of names without a connection, the 256 that were connected last are kept. Transfers count on the
// side that started them.
int32_t kvf_agent_peers(struct kvf_agent *agent,
                        struct kvf_buffer *out);

// Sends a message of at most 16 MiB, copied before this returns. It arrives once and in order, unless the connection
// breaks. KVF_EXHAUSTED while too many bytes to this peer are not sent yet.
int32_t kvf_agent_send(struct kvf_agent *agent,
                       uint64_t peer,
                       const uint8_t *data,
                       size_t data_len);

// Takes up to `cap` of the oldest events, without waiting. `*count` becomes their number, which may be 0. The
// payloads of the events taken before are dropped: fetch what you need with kvf_agent_recv first. One thread at a
// time polls or waits. While a thread polls without a pause for something small, it drives the agent in place of the
// library's thread.
int32_t kvf_agent_poll(struct kvf_agent *agent,
                       struct kvf_event *out,
                       size_t cap,
                       size_t *count);

// Like kvf_agent_poll, but waits up to `timeout_ms` milliseconds for the first event. KVF_SHUT_DOWN when the agent has
// ended and every event was taken.
int32_t kvf_agent_wait(struct kvf_agent *agent,
                       uint32_t timeout_ms,
                       struct kvf_event *out,
                       size_t cap,
                       size_t *count);

// Fetches an event's payload, once. KVF_NOT_FOUND after it was fetched, and after the next poll or wait.
int32_t kvf_agent_recv(struct kvf_agent *agent, uint64_t payload, struct kvf_buffer *out);

// Gives gauges, counters and histograms since the start, as a msgpack map. kvf_stats_metrics tells what each is.
int32_t kvf_agent_stats(struct kvf_agent *agent,
                        struct kvf_buffer *out);

// Cancels every transfer, closes every connection and frees UCX, waiting at most `timeout_ms` milliseconds. After
// KVF_OK no memory is touched any more; the events of ended transfers can still be taken, and everything else gives
// KVF_SHUT_DOWN. A later call does nothing and returns what the first one did. After KVF_TIMEOUT registered memory must stay
// allocated for ever: an operation has not ended, or a peer on this host that copies by itself has not answered.
//
// Messages sent before leave first, for which a peer that has not answered yet is waited for, within cancel_grace_ms and half of
// `timeout_ms`. How many could not be delivered to a peer is said on the log.
int32_t kvf_agent_shutdown(struct kvf_agent *agent,
                           uint32_t timeout_ms);

// Frees the agent, after a shutdown of at most 10 seconds if there was none. It returns the shutdown's status, whichever call
// made it: unless that is KVF_OK, registered memory must stay allocated for ever. The handle is dead in any case.
int32_t kvf_agent_free(struct kvf_agent *agent);

// Starts a transfer and returns at once. `direction` is a kvf_direction. The block ids of all `lists` pairs of lists
// lie one list after the other in `local_ids` and in `remote_ids`; list `i` is the entries from `list_offsets[i]` to
// before `list_offsets[i + 1]` of both, so that `list_offsets` has `lists + 1` entries. All arrays may be freed when
// this returns. `user_data` means nothing to kvferry, and comes back in the transfer's event.
//
// What is wrong with the blocks (an id out of range, an unknown region) is the status of the transfer's
// KVF_EVENT_TRANSFER_DONE.
int32_t kvf_agent_transfer(struct kvf_agent *agent,
                           uint64_t peer,
                           uint32_t direction,
                           const struct kvf_segment *segments,
                           size_t segments_len,
                           const uint32_t *local_ids,
                           const uint32_t *remote_ids,
                           const uint64_t *list_offsets,
                           size_t lists,
                           uint64_t user_data,
                           uint64_t *transfer);

// As kvf_agent_transfer, and sends the peer a message once every byte was moved. It has at most 16 MiB; the library
// sends it, whether or not this side polls. It arrives as KVF_EVENT_MESSAGE, in order with those of kvf_agent_send.
// A transfer that fails sends none. KVF_EXHAUSTED while too many bytes to this peer are not sent yet.
int32_t kvf_agent_transfer_and_send(struct kvf_agent *agent,
                                    uint64_t peer,
                                    uint32_t direction,
                                    const struct kvf_segment *segments,
                                    size_t segments_len,
                                    const uint32_t *local_ids,
                                    const uint32_t *remote_ids,
                                    const uint64_t *list_offsets,
                                    size_t lists,
                                    const uint8_t *message,
                                    size_t message_len,
                                    uint64_t user_data,
                                    uint64_t *transfer);

// Stops a transfer. Its KVF_EVENT_TRANSFER_DONE still follows, with KVF_CANCELLED unless it was complete.
int32_t kvf_agent_cancel(struct kvf_agent *agent, uint64_t transfer);

// Waits up to `timeout_ms` milliseconds until a transfer is over and touches no memory. Its KVF_EVENT_TRANSFER_DONE
// is polled as always. Returns at once for a transfer that is over. KVF_TIMEOUT when it is not over in time: then
// its memory must stay allocated. KVF_SHUT_DOWN when the agent has ended before it was over: then its memory must
// stay allocated for ever. After kvf_agent_cancel this waits until the memory is safe.
int32_t kvf_agent_wait_transfer(struct kvf_agent *agent,
                                uint64_t transfer,
                                uint32_t timeout_ms);

// Starts a listener that serves the metadata of one engine's ranks to other engines. It is bound when this returns; a
// port that is taken is KVF_ADDRESS_IN_USE.
//
// `config` is a msgpack map with engine_id and the keys for a listener that kvf_settings_describe tells and
// docs/configuration.md lists.
int32_t kvf_listener_start(const uint8_t *config,
                           size_t config_len,
                           struct kvf_listener **out);

// Adds one rank's metadata (of kvf_worker_metadata); `*missing` becomes the number of ranks still missing. Queries are
// answered with "not ready" until there are none.
int32_t kvf_listener_offer(struct kvf_listener *listener,
                           const uint8_t *metadata,
                           size_t metadata_len,
                           uint32_t *missing);

// The host and port to tell other engines.
int32_t kvf_listener_address(struct kvf_listener *listener, struct kvf_buffer *host, uint16_t *port);

// Stops the listener, frees its port and the handle.
int32_t kvf_listener_free(struct kvf_listener *listener);

// Asks a handshake listener for the metadata of all ranks of its engine. It is at `host`:`port`; the ranks are
// compared with an engine that need not run. Waits up to the configured time, also for a listener that is not
// complete yet, but not for one that is not up.
//
// `config` is a msgpack map, or NULL with length 0 for the defaults. Keys: engine (str: the engine expected there; any),
// key_file (as in kvf_listener_start), timeout_ms (10000), own (the side that asks: map with model and engine, as model
// and producer in kvf_plan_describe, and compat, a map of those compatibility fields that are known).
//
// `*out` is a msgpack map. survey: map with protocol (the newest version that both speak), engine, incarnation (hexadecimal digits), shape (tp,
// pp, dcp), ranks (list of maps with rank, name, ucx_version, regions, bytes, memory, layers, heads and blocks) and fields
// (list of maps with name, here (str or nil), there, must_match, fits (bool, or nil where nothing is compared) and
// remedy). agents: the ranks' agent metadata in the same order, for kvf_agent_connect.
//
// KVF_UNREACHABLE and KVF_TIMEOUT without an answer, KVF_INCOMPATIBLE where only one side has a key or another one or where
// another engine answers, KVF_VERSION_MISMATCH and KVF_CORRUPT for an answer that cannot be understood.
int32_t kvf_handshake_survey(const char *host,
                             size_t host_len,
                             uint16_t port,
                             const uint8_t *config,
                             size_t config_len,
                             struct kvf_buffer *out);

// Starts a worker: opens UCX and starts the thread that owns it.
//
// `config` is a msgpack map with engine_id and the keys for a worker that kvf_settings_describe tells and
// docs/configuration.md lists.
int32_t kvf_worker_start(const uint8_t *config, size_t config_len, struct kvf_worker **out);

// Registers `len` bytes at `addr` as a KV-cache region. `*index` is its index in the geometry. `kind` is a
// kvf_memory_kind, `device` the ordinal of the CUDA device (0 for host memory). Waits for the registration. All
// regions come before kvf_worker_set_geometry.
//
// The memory must stay allocated until kvf_worker_shutdown or kvf_worker_free has returned KVF_OK.
int32_t kvf_worker_register(struct kvf_worker *worker,
                            void *addr,
                            uint64_t len,
                            uint32_t kind,
                            uint32_t device,
                            uint32_t *index);

// States where the rank keeps which part of the cache, which completes its metadata. Once; again with the same
// geometry does nothing.
//
// `geometry` is a msgpack map; docs/protocol.md has what each key means. groups: list of maps with kind ("full", "latent",
// "state", {"sliding_window": {"window": tokens}} or {"chunked": {"chunk": tokens}}) and block_size (tokens), and where
// tokens are dealt over ranks (decode context parallelism) token_ranks (1), token_rank (0) and token_interleave (1). areas:
// list of maps with layer, part (str), group (index), region (index), offset, num_blocks, block_stride, heads, first_head,
// total_heads, head_stride, pages (1), page_stride (0), tokens, token_stride, units (1), unit_stride (0), content,
// heads_by_rank (false: whether first_head and total_heads count the heads of each rank as different ones) and format (""
// states none: what the bytes are, the same on both engines). offset, strides and content are in bytes.
int32_t kvf_worker_set_geometry(struct kvf_worker *worker,
                                const uint8_t *geometry,
                                size_t geometry_len);

// The rank's metadata, for the scheduler side. Its size grows with regions and layers, never with blocks.
int32_t kvf_worker_metadata(struct kvf_worker *worker, struct kvf_buffer *out);

// Hands the metadata to a listener that takes pushes. Waits up to `timeout_ms` milliseconds for it. `expected` is
// the engine's number of ranks; `*missing` becomes how many the listener still lacks.
int32_t kvf_worker_push_metadata(struct kvf_worker *worker,
                                 const char *host,
                                 size_t host_len,
                                 uint16_t port,
                                 uint32_t expected,
                                 uint32_t timeout_ms,
                                 uint32_t *missing);

// Hands over one step, as kvf_scheduler_step made it, and returns at once. A step that grants leases, the first one after
// kvf_scheduler_finished returned params, must come when all that the finished requests write is in memory, on a GPU when
// its kernels are over: consumers that await these requests read them then.
int32_t kvf_worker_submit(struct kvf_worker *worker,
                          const uint8_t *step,
                          size_t step_len);

// Sets an outbox: reports go to `outbox`, `capacity` bytes with the struct itself. Polling then reads the caller's own
// memory and needs no call, which costs least. While a thread reads there no other may, nor call kvf_worker_poll or
// kvf_worker_wait, which take the report there. With a capacity of no more than the struct, `more` only tells of reports.
//
// The memory is emptied, and must stay allocated until another call of this function has succeeded or kvf_worker_free has
// returned. NULL, with a capacity of 0, ends it. What was not read in an earlier outbox waits for the next poll.
int32_t kvf_worker_set_outbox(struct kvf_worker *worker,
                              struct kvf_outbox *outbox,
                              size_t capacity);

// Gives the events since the last poll, as an encoded report. An empty buffer without any. Never waits.
int32_t kvf_worker_poll(struct kvf_worker *worker, struct kvf_buffer *out);

// Like kvf_worker_poll, but waits up to `timeout_ms` milliseconds for something to happen. KVF_SHUT_DOWN when the worker has
// ended and every report was taken.
int32_t kvf_worker_wait(struct kvf_worker *worker,
                        uint32_t timeout_ms,
                        struct kvf_buffer *out);

// Figures since the start as a msgpack map: totals (as stats in reports), gauges, agent (as of kvf_agent_stats),
// malformed_steps, malformed_messages. kvf_stats_metrics tells what each of totals and agent is.
int32_t kvf_worker_stats(struct kvf_worker *worker,
                         struct kvf_buffer *out);

// Ends every request with a report, releases leases and frees UCX. Waits at most `timeout_ms` milliseconds. After
// KVF_OK no memory is touched any more; the last reports can still be polled. A later call does nothing and returns
// what the first one did. After KVF_TIMEOUT registered memory must stay allocated for ever.
int32_t kvf_worker_shutdown(struct kvf_worker *worker,
                            uint32_t timeout_ms);

// As kvf_worker_shutdown, for an engine that starts a new worker later. It tells the new one by kvf_scheduler_renew;
// prefills that wait to be loaded stay with their producers, as long as the leases last. After KVF_TIMEOUT the
// memory must stay as it is for ever.
int32_t kvf_worker_suspend(struct kvf_worker *worker,
                           uint32_t timeout_ms);

// Frees the worker, after a shutdown of at most 10 seconds if there was none. It returns the shutdown's status, whichever call
// made it: unless that is KVF_OK, registered memory must stay allocated for ever. The handle is dead in any case.
int32_t kvf_worker_free(struct kvf_worker *worker);

// Starts a scheduler side. It touches no device memory and no UCX.
//
// `config` is a msgpack map with engine_id, groups (list of maps with kind and block_size, as in
// kvf_worker_set_geometry) and the keys for a scheduler that kvf_settings_describe tells and docs/configuration.md
// lists.
int32_t kvf_scheduler_start(const uint8_t *config,
                            size_t config_len,
                            struct kvf_scheduler **out);

// Takes the metadata of the engine's ranks without serving it. An engine of several ranks that only receives needs
// it before its first load.
int32_t kvf_scheduler_set_engine(struct kvf_scheduler *scheduler,
                                 const struct kvf_rank_metadata *ranks,
                                 size_t ranks_len);

// Takes the metadata of all ranks in place of what was given before. Their workers are new and hold the same parts of the
// cache, as after a sleep in which its memory was freed. The next step tells the new workers of requests that wait to be
// loaded; the old ones have reported what they had begun as over (kvf_worker_suspend). The engine has another incarnation
// from then on.
int32_t kvf_scheduler_renew(struct kvf_scheduler *scheduler,
                            const struct kvf_rank_metadata *ranks,
                            size_t ranks_len);

// As kvf_scheduler_set_engine, and starts the handshake listener with the metadata. `*host` and `*port` are what other engines are
// told. The port is bound when this returns.
int32_t kvf_scheduler_serve(struct kvf_scheduler *scheduler,
                            const struct kvf_rank_metadata *ranks,
                            size_t ranks_len,
                            struct kvf_buffer *host,
                            uint16_t *port);

// Consumer: a request with a remote prefill has arrived. Connect early and keep its lease alive. `params` here and
// below is the request's kv_transfer_params as a msgpack map; what is wrong with them affects this request only.
//
// Several requests may load one prefill, each with the same params, as the samples of one prompt (n > 1) do. The lease is
// released with the last of those that have arrived. Where others may arrive later, add the key shared (true) to the
// params in every call: the lease is then kept for 5 s more.
//
// With multi_turn, a producer's request whose params name a decode engine's blocks (do_remote_decode with remote_block_ids) is
// loaded in the same way and handed over in its turn. The `prompt_tokens` of kvf_scheduler_matched and
// kvf_scheduler_allocated are then those at its beginning that the blocks hold too, which the host has to know.
int32_t kvf_scheduler_arrived(struct kvf_scheduler *scheduler,
                              const char *request_id,
                              size_t request_id_len,
                              const uint8_t *params,
                              size_t params_len);

// How many tokens beyond `computed_tokens` can be loaded, and whether between steps (`*asynchronous` 1). Has no side
// effects.
int32_t kvf_scheduler_matched(struct kvf_scheduler *scheduler,
                              const char *request_id,
                              size_t request_id_len,
                              const uint8_t *params,
                              size_t params_len,
                              uint64_t prompt_tokens,
                              uint64_t computed_tokens,
                              uint64_t *tokens,
                              uint8_t *asynchronous);

// Consumer: queues the load of the prompt's last `external_tokens` tokens into allocated blocks. 0 releases the
// lease. `prompt_tokens` are all of the prompt's. A second call for the same request does nothing. The ids of all
// `lists` lists, one per KV-cache group, lie one list after the other in `ids`; list `i` is the entries from
// `list_offsets[i]` to before `list_offsets[i + 1]`.
int32_t kvf_scheduler_allocated(struct kvf_scheduler *scheduler,
                                const char *request_id,
                                size_t request_id_len,
                                const uint8_t *params,
                                size_t params_len,
                                const uint32_t *ids,
                                const uint64_t *list_offsets,
                                size_t lists,
                                uint64_t prompt_tokens,
                                uint64_t external_tokens);

// Producer: tells if a consumer follows the prefill's progress, so that kvf_scheduler_progressed is worth calling.
// `*followed` becomes 1 then; the consumer awaits the prefill as `name` (its transfer_id).
int32_t kvf_scheduler_is_followed(struct kvf_scheduler *scheduler,
                                  const char *name,
                                  size_t name_len,
                                  uint8_t *followed);

// Producer: announces that the first `tokens` tokens of a prefill under way are written. Consumers await it as
// `name` (its transfer_id). All ranks have written the tokens into these blocks, which are passed as in
// kvf_scheduler_allocated; those of groups with windows, chunks or states are ignored. Consumers read them from now
// on, and rely on them if the lease is granted at the end (kvf_scheduler_finished). `tokens` 0: the blocks given
// before are given away, as when the request is preempted; to be said before others are given.
//
// To be called until kvf_scheduler_finished, and after it, while the blocks are kept, if what was written last is known only
// then. Optional: without it, consumers read when the prefill is over. Of several requests with one name the first counts.
int32_t kvf_scheduler_progressed(struct kvf_scheduler *scheduler,
                                 const char *request_id,
                                 size_t request_id_len,
                                 const char *name,
                                 size_t name_len,
                                 const uint32_t *ids,
                                 const uint64_t *list_offsets,
                                 size_t lists,
                                 uint64_t tokens);

// A request ended as `outcome` (a kvf_outcome) says. `*keep` is 1 when its blocks must stay until a report says that
// its sending is over. `*answer` is the kv_transfer_params for the client as a msgpack map, empty when there are none.
// Blocks are passed as in kvf_scheduler_allocated.
//
// With multi_turn, a consumer's complete request may be kept too, and `*answer` is for the producer of the conversation's next
// turn. Without num_blocks nothing is. A producer's request that ends before the reports of its own load were taken is handed
// over to nobody: `*keep` is 1 for that load.
int32_t kvf_scheduler_finished(struct kvf_scheduler *scheduler,
                               const char *request_id,
                               size_t request_id_len,
                               const uint8_t *params,
                               size_t params_len,
                               uint32_t outcome,
                               const uint32_t *ids,
                               const uint64_t *list_offsets,
                               size_t lists,
                               uint64_t computed_tokens,
                               uint8_t *keep,
                               struct kvf_buffer *answer);

// Gives the new work for the workers, for kvf_worker_submit of every rank. Each piece of work is handed out once.
int32_t kvf_scheduler_step(struct kvf_scheduler *scheduler,
                           struct kvf_buffer *out);

// Tells if the next step has work (`*pending` 1). An idle engine should make one then.
int32_t kvf_scheduler_has_pending(struct kvf_scheduler *scheduler, uint8_t *pending);

// Takes in the encoded report of a rank (of kvf_worker_poll), or of several (of kvf_report_merge). Every rank's reports are
// needed, each as it comes; their order does not matter. One that comes again ends nothing twice; one of a rank that the
// engine has not (tp_size, pp_size) is KVF_INVALID_ARGUMENT.
//
// `*outcome` becomes what is known with it, as a msgpack map; NULL where the host knows by itself. finished_sending (free
// its blocks) and finished_recving (decode it): requests that every rank has ended, each once. failed_recving: those of
// finished_recving that any rank failed (request, cause, message, invalid_blocks as little-endian words of 32 bits): the
// cause is the lowest failed rank's, the message has every one's, the blocks are the union. granted: prefills with a
// transfer_id whose lease every rank has; this call tells those that await them. records (rank, record) and stats: the
// report's figures.
int32_t kvf_scheduler_report(struct kvf_scheduler *scheduler,
                             const uint8_t *report,
                             size_t report_len,
                             struct kvf_buffer *outcome);

// Ends a request on `side` (a kvf_side) for hosts that count over all ranks. Every rank is done with it. It is over
// from now on, also where ranks' reports come later or never. One that is over already, or not known, is no error.
// Its id must not be used again before the reports have come, which would count for the new request. A host that
// goes by the outcomes of kvf_scheduler_report does not need this.
int32_t kvf_scheduler_over(struct kvf_scheduler *scheduler,
                           const char *request_id,
                           size_t request_id_len,
                           uint32_t side);

// Evicts the `most` oldest conversations that are kept for their next turns (multi_turn). The host needs their
// blocks, or their contents are no longer valid, as after an update of the weights. Their blocks may be used again
// when reports say that their sending is over. `*count` becomes how many evicted ones, now or earlier, have blocks
// that are not free yet.
int32_t kvf_scheduler_forget_histories(struct kvf_scheduler *scheduler,
                                       uint64_t most,
                                       uint64_t *count);

// Counters since the start and gauges as a msgpack map; kvf_stats_metrics tells what each is.
int32_t kvf_scheduler_stats(struct kvf_scheduler *scheduler, struct kvf_buffer *out);

// Stops the listener, frees its port and the handle.
int32_t kvf_scheduler_free(struct kvf_scheduler *scheduler);

// Starts an aggregator, for hosts with a scheduler side of their own. A kvf_scheduler has one inside. `config` is a
// msgpack map. Keys: ranks (list of maps with pp and tp: every rank of the engine), limit (requests remembered).
int32_t kvf_aggregator_start(const uint8_t *config,
                             size_t config_len,
                             struct kvf_aggregator **out);

// Takes in an encoded report (of kvf_worker_poll) or a batch (of kvf_report_merge). Any order will do, and a report
// that comes again changes nothing.
int32_t kvf_aggregator_add(struct kvf_aggregator *aggregator,
                           const uint8_t *report,
                           size_t report_len);

// Makes `count` ranks, whichever, end `request` on `side` (a kvf_side), in place of all.
int32_t kvf_aggregator_expect(struct kvf_aggregator *aggregator,
                              const char *request,
                              size_t request_len,
                              uint32_t side,
                              uint32_t count);

// Forgets a request, so that its id can be used again.
int32_t kvf_aggregator_forget(struct kvf_aggregator *aggregator, const char *request, size_t request_len);

// Gives the requests that ended since the last call. `*out` is the msgpack map that kvf_scheduler_report gives.
int32_t kvf_aggregator_take(struct kvf_aggregator *aggregator,
                            struct kvf_buffer *out);

// Frees the aggregator.
int32_t kvf_aggregator_free(struct kvf_aggregator *aggregator);

// Decodes a report to a msgpack map. It has rank, granted, finished_sending, finished_recving, failed_recving,
// records and stats. Block ids are binary, little-endian words of 32 bits.
//
// granted: prefills with a transfer_id, by this engine's request ids, whose lease this rank has: their blocks are written, so
// that consumers which await them may read. finished_sending: prefills whose blocks may be freed. finished_recving: loads
// that are over; those that failed are in failed_recving too.
int32_t kvf_report_decode(const uint8_t *report,
                          size_t report_len,
                          struct kvf_buffer *out);

// The inverse of kvf_report_decode: tests of hosts make reports up with it.
int32_t kvf_report_encode(const uint8_t *body, size_t body_len, struct kvf_buffer *out);

// Combines two encoded reports or batches into one batch. It is for kvf_scheduler_report or kvf_aggregator_add.
// Associative and commutative.
int32_t kvf_report_merge(const uint8_t *left,
                         size_t left_len,
                         const uint8_t *right,
                         size_t right_len,
                         struct kvf_buffer *out);

// Adds two maps of a worker's figures, such as the stats of a report. An empty map is the identity; the order does not
// matter.
int32_t kvf_stats_merge(const uint8_t *left,
                        size_t left_len,
                        const uint8_t *right,
                        size_t right_len,
                        struct kvf_buffer *out);

// Describes every figure, as a msgpack map whose metrics is a list of maps: scope ("worker": the stats of reports and the
// totals of kvf_worker_stats; "agent"; "peer": the maps of kvf_agent_peers; "scheduler"), key (there), kind ("counter",
// "gauge" or "histogram"), name (in Prometheus, without prefix and the _total of counters), unit, help; causes, of a counter that is a map by cause, else
// empty; bounds and divisor of histograms, which are maps of counts per bucket (without zeros at the end) and sum:
// the inclusive upper bounds of all buckets but the last, and by what bounds and sum are divided to give `unit`.
int32_t kvf_stats_metrics(struct kvf_buffer *out);

// Figures in Prometheus' text format, under names that begin with kvferry_. `rows` is a msgpack map whose rows is a list
// of maps, one per source: labels (map of texts), and of totals (of kvf_worker_stats, or merged stats of reports), agent
// (of kvf_agent_stats), peers (the list of that name of kvf_agent_peers) and scheduler (of kvf_scheduler_stats) those that there are; other keys
// are ignored.
int32_t kvf_stats_prometheus(const uint8_t *rows,
                             size_t rows_len,
                             struct kvf_buffer *out);

// Works out which rank reads what from which rank for one request. Needs neither engines nor memory.
//
// `deployment` is a msgpack map. Keys: model (map with groups: a list of maps with kind, as in
// kvf_worker_set_geometry, layers (list of layer numbers) and parts (list of maps with name, heads, positions (1) and
// bytes per head and token)), producer and consumer (maps with tp, pp, stages, dcp, dcp_interleave, block_size (list: one
// number, or one per group), pages, layout ("token_major", "head_major", "whole" or a map turned: {element}), parts
// ("packed", "in_block" or "regions"), layers_in_block, shared_groups, num_blocks, lead, gap; all have defaults), tokens,
// cached_tokens (0), reuses_blocks (true), consecutive_blocks (false), max_operation_bytes (4 MiB).
//
// `*out` is a msgpack map. producers and consumers: lists of maps with rank, layers and heads (lists of first and last),
// tokens (per group, number and count among the ranks that share them), bytes, operations, peers (producer: how many
// ranks it hears from). links: list of maps with consumer, producer, layers, heads, parts, bytes, segments, operations,
// run_min, run_median, run_max (bytes per operation), gathered (bool: host memory is moved by messages of many runs) and
// plan_bytes.
int32_t kvf_plan_describe(const uint8_t *deployment,
                          size_t deployment_len,
                          struct kvf_buffer *out);

// Describes every key of every configuration, with the value that it has in this process.
//
// `given` is a msgpack map of what an operator sets, as in vLLM's kv_connector_extra_config, or NULL with length 0 for
// nothing. It is checked: an unknown key or a wrong value is KVF_INVALID_ARGUMENT, and so is a wrong environment
// variable.
//
// `*out` is a msgpack map. settings: list of maps with key, parts (list of agent, worker, scheduler, listener and
// aggregator: whose configuration the key is in), giver ("operator"; "program": set by the program that holds the engine;
// "environment": set by the variable alone), type (in words), unit, default (nil where there is none, then otherwise
// says in words what holds, or "required"), otherwise, value, source ("given", "environment" or "default"), variable
// (the environment variable, or nil), former (the key's earlier name, if the value was given under it, or nil), is_retired
// (the key has no effect) and help. unknown_variables: list of maps with name and nearest (or nil), the
// environment variables called KVFERRY_* that nothing reads.
int32_t kvf_settings_describe(const uint8_t *given,
                              size_t given_len,
                              struct kvf_buffer *out);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVFERRY_H */
