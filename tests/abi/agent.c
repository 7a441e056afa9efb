/*
 * Two processes move blocks through the C ABI, every byte checked, and every kind of bad input is tried.
 *
 * agent.c TRANSPORT runs the test; it starts itself again as the peer.
 */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* A msgpack map of texts that are each shorter than 32 bytes. */
typedef struct config {
  uint8_t bytes[512];
  size_t len;
} config;

static void config_text(config *c, const char *text)
{
  size_t len = strlen(text);
  CHECK(len < 32 && c->len + 1 + len <= sizeof c->bytes);
  c->bytes[c->len++] = (uint8_t)(0xa0 | len);
  memcpy(c->bytes + c->len, text, len);
  c->len += len;
}

static void config_add(config *c, const char *key, const char *value)
{
  if (c->len == 0) {
    c->bytes[c->len++] = 0x80;
  }
  c->bytes[0]++;
  config_text(c, key);
  config_text(c, value);
}

enum { REGIONS = 2, BLOCKS = 12, LOCAL = 2048, REMOTE = 3000, MARGIN = 40 };

/* Long enough for a busy machine and a memory checker; nothing waits so long when all goes well. */
enum { GENEROUS_MS = 120000 };

/* A byte that differs by owner, region, block and offset. */
static uint8_t tagged(unsigned owner, unsigned region, unsigned block, unsigned offset)
{
  uint32_t mix = owner * 2654435761u + region * 40503u + block * 9973u + offset * 31u + (offset >> 8) * 7u;
  return (uint8_t)(mix >> 5 ^ mix);
}

static uint8_t *make_cache(unsigned owner, unsigned region, unsigned stride)
{
  uint8_t *cache = malloc((size_t)BLOCKS * stride);
  CHECK(cache != NULL);
  for (unsigned block = 0; block < BLOCKS; block++) {
    for (unsigned offset = 0; offset < stride; offset++) {
      cache[block * stride + offset] = tagged(owner, region, block, offset);
    }
  }
  return cache;
}

/* Descriptors of the peer's process. UCX writes its log to standard output. */
enum { FROM_TEST = 100, TO_TEST };

static void write_all(int fd, const void *data, size_t len)
{
  const uint8_t *at = data;
  while (len > 0) {
    ssize_t done = write(fd, at, len);
    CHECK(done > 0);
    at += done;
    len -= (size_t)done;
  }
}

static void read_all(int fd, void *data, size_t len)
{
  uint8_t *at = data;
  while (len > 0) {
    ssize_t done = read(fd, at, len);
    CHECK(done > 0);
    at += done;
    len -= (size_t)done;
  }
}

static kvf_agent *start(const char *name, const char *transport)
{
  config c = {.len = 0};
  config_add(&c, "name", name);
  config_add(&c, "transport", transport);
  kvf_agent *agent = NULL;
  OK(kvf_agent_start(c.bytes, c.len, &agent));
  CHECK(agent != NULL);
  return agent;
}

/* The peer: serves its caches until it is told to stop, then shows them. */
static int serve(const char *transport)
{
  kvf_agent *agent = start("c peer", transport);
  uint8_t *caches[REGIONS];
  uint64_t regions[REGIONS];
  for (unsigned region = 0; region < REGIONS; region++) {
    uint32_t index = 99;
    caches[region] = make_cache(1, region, REMOTE);
    OK(kvf_agent_register(agent, caches[region], (uint64_t)BLOCKS * REMOTE, KVF_MEMORY_HOST, 0, &regions[region], &index));
    CHECK(index == region);
  }
  kvf_buffer metadata;
  OK(kvf_agent_metadata(agent, &metadata));
  uint64_t len = metadata.len;
  write_all(TO_TEST, &len, sizeof len);
  write_all(TO_TEST, metadata.data, metadata.len);
  OK(kvf_buffer_free(&metadata));

  char order = 0;
  read_all(FROM_TEST, &order, 1);
  CHECK(order == 's');
  for (int told = 0; !told;) {
    kvf_event event;
    size_t count = 0;
    OK(kvf_agent_wait(agent, GENEROUS_MS, &event, 1, &count));
    CHECK(count == 1);
    if (event.kind == KVF_EVENT_MESSAGE) {
      kvf_buffer text;
      OK(kvf_agent_recv(agent, event.payload, &text));
      told = text.len == 5 && memcmp(text.data, "there", 5) == 0;
      CHECK(told);
      OK(kvf_buffer_free(&text));
    }
  }
  for (unsigned region = 0; region < REGIONS; region++) {
    OK(kvf_agent_deregister(agent, regions[region]));
    write_all(TO_TEST, caches[region], (size_t)BLOCKS * REMOTE);
    free(caches[region]);
  }
  read_all(FROM_TEST, &order, 1);
  CHECK(order == 'q');
  OK(kvf_agent_shutdown(agent, GENEROUS_MS));
  OK(kvf_agent_free(agent));
  return 0;
}

/* Waits for the end of a transfer; keeps its error's text in `text`. */
static kvf_event finish(kvf_agent *agent, uint64_t transfer, char *text, size_t cap)
{
  for (;;) {
    kvf_event events[4];
    size_t count = 0;
    OK(kvf_agent_wait(agent, GENEROUS_MS, events, 4, &count));
    CHECK(count > 0);
    for (size_t i = 0; i < count; i++) {
      if (events[i].kind != KVF_EVENT_TRANSFER_DONE || events[i].transfer != transfer) {
        continue;
      }
      text[0] = '\0';
      if (events[i].payload != 0) {
        kvf_buffer payload;
        OK(kvf_agent_recv(agent, events[i].payload, &payload));
        CHECK(payload.len == events[i].payload_len);
        snprintf(text, cap, "%.*s", (int)payload.len, (const char *)payload.data);
        OK(kvf_buffer_free(&payload));
        FAILS(kvf_agent_recv(agent, events[i].payload, &payload), KVF_NOT_FOUND, "fetched already");
      }
      return events[i];
    }
  }
}

static void check_bad_input_without_a_peer(kvf_agent *agent)
{
  uint64_t id = 77;
  uint32_t index = 77;
  size_t count = 77;
  kvf_buffer buffer = {NULL, 0, 0};
  kvf_event event;
  uint8_t memory[64];
  uint64_t odd[2];
  int not_an_agent = 0;

  FAILS(kvf_agent_start(NULL, 0, NULL), KVF_INVALID_ARGUMENT, "out is NULL");
  FAILS(kvf_agent_start(NULL, 5, &agent), KVF_INVALID_ARGUMENT, "config is NULL");
  FAILS(kvf_agent_start((const uint8_t *)"\xc1", 1, &agent), KVF_INVALID_ARGUMENT, "config");
  config unknown = {.len = 0};
  config_add(&unknown, "colour", "blue");
  FAILS(kvf_agent_start(unknown.bytes, unknown.len, &agent), KVF_INVALID_ARGUMENT, "colour");
  config wrong = {.len = 0};
  config_add(&wrong, "window", "many");
  FAILS(kvf_agent_start(wrong.bytes, wrong.len, &agent), KVF_INVALID_ARGUMENT, "window must be a whole number from 1 to 1024");
  char text[256] = "";
  OK(kvf_last_error(text, sizeof text, NULL));
  CHECK(strstr(text, "window") != NULL);
  OK(kvf_settings_describe(NULL, 0, &buffer));
  CHECK(buffer.len > 1000);
  OK(kvf_buffer_free(&buffer));
  FAILS(kvf_settings_describe(unknown.bytes, unknown.len, &buffer), KVF_INVALID_ARGUMENT, "colour");
  FAILS(kvf_settings_describe(NULL, 0, NULL), KVF_INVALID_ARGUMENT, "out is NULL");

  FAILS(kvf_agent_metadata(NULL, &buffer), KVF_INVALID_ARGUMENT, "NULL");
  FAILS(kvf_agent_metadata((kvf_agent *)(void *)&not_an_agent, &buffer), KVF_NOT_FOUND, "no live agent");
  FAILS(kvf_listener_free((kvf_listener *)(void *)agent), KVF_INVALID_ARGUMENT, "of the kind agent, expected listener");
  FAILS(kvf_agent_metadata(agent, NULL), KVF_INVALID_ARGUMENT, "out is NULL");
  FAILS(kvf_agent_poll(agent, &event, 0, &count), KVF_INVALID_ARGUMENT, "cap is 0");
  FAILS(kvf_agent_poll(agent, NULL, 4, &count), KVF_INVALID_ARGUMENT, "out is NULL");

  FAILS(kvf_agent_register(agent, NULL, 64, KVF_MEMORY_HOST, 0, &id, &index), KVF_INVALID_ARGUMENT, "null");
  FAILS(kvf_agent_register(agent, memory, 0, KVF_MEMORY_HOST, 0, &id, &index), KVF_INVALID_ARGUMENT, "empty");
  FAILS(kvf_agent_register(agent, memory, 64, 9, 0, &id, &index), KVF_INVALID_ARGUMENT, "memory kind 9");
  FAILS(kvf_agent_register(agent, (void *)16, 64, KVF_MEMORY_HOST, 0, &id, &index), KVF_OUT_OF_RANGE, "not mapped");
  FAILS(kvf_agent_register(agent, memory, 64, KVF_MEMORY_HOST, 0, (uint64_t *)(void *)((char *)odd + 1), &index),
        KVF_INVALID_ARGUMENT, "not aligned");
  FAILS(kvf_agent_deregister(agent, 12345), KVF_NOT_FOUND, "region");
  FAILS(kvf_agent_cancel(agent, 12345), KVF_NOT_FOUND, "transfer");
  FAILS(kvf_agent_disconnect(agent, 12345), KVF_NOT_FOUND, "peer");
  FAILS(kvf_agent_send(agent, 12345, memory, 1), KVF_NOT_FOUND, "peer");
  FAILS(kvf_agent_connect(agent, NULL, 7, &id), KVF_INVALID_ARGUMENT, "metadata is NULL");
  FAILS(kvf_agent_connect(agent, (const uint8_t *)"hello", 5, &id), KVF_CORRUPT, "not a kvferry message");
  CHECK(id == 77 && index == 77 && count == 77 && buffer.data == NULL);

  /* A buffer is freed once, whatever is tried; so is an agent. */
  OK(kvf_agent_metadata(agent, &buffer));
  uint8_t *damaged = malloc(buffer.len);
  CHECK(damaged != NULL);
  for (size_t cut = 0; cut < buffer.len; cut += 11) {
    memcpy(damaged, buffer.data, buffer.len);
    CHECK(kvf_agent_connect(agent, damaged, cut, &id) < 0);
  }
  free(damaged);
  kvf_buffer copy = buffer;
  OK(kvf_buffer_free(&buffer));
  CHECK(buffer.data == NULL && buffer.len == 0);
  OK(kvf_buffer_free(&buffer));
  FAILS(kvf_buffer_free(&copy), KVF_NOT_FOUND, "freed already");

  kvf_agent *second = start("second", "tcp");
  OK(kvf_agent_free(second));
  FAILS(kvf_agent_free(second), KVF_NOT_FOUND, "no live agent");
  FAILS(kvf_agent_metadata(second, &buffer), KVF_NOT_FOUND, "freed already");
}

typedef struct last {
  kvf_agent *agent;
  uint64_t transfer;
} last;

/* Counts the events of the last transfer until a wait says that none will come. */
static void *wait_for_the_end(void *waited)
{
  const last *given = waited;
  uintptr_t found = 0;
  for (;;) {
    kvf_event event;
    size_t count = 77;
    const int32_t status = kvf_agent_wait(given->agent, GENEROUS_MS, &event, 1, &count);
    if (status != KVF_OK) {
      FAILS(status, KVF_SHUT_DOWN, "every event was taken");
      CHECK(count == 77);
      return (void *)found;
    }
    CHECK(count == 1);
    found += event.kind == KVF_EVENT_TRANSFER_DONE && event.transfer == given->transfer;
  }
}

/* The last events can be taken after a shutdown, and then a wait says that none will come, also to who waits already. */
static void check_the_end(kvf_agent *agent, uint64_t transfer)
{
  last given = {agent, transfer};
  pthread_t waiter;
  CHECK(pthread_create(&waiter, NULL, wait_for_the_end, &given) == 0);
  OK(kvf_agent_shutdown(agent, GENEROUS_MS));
  void *found = NULL;
  CHECK(pthread_join(waiter, &found) == 0);
  CHECK((uintptr_t)found == 1);
  kvf_event event;
  size_t count = 77;
  FAILS(kvf_agent_wait(agent, 0, &event, 1, &count), KVF_SHUT_DOWN, "every event was taken");
  OK(kvf_agent_poll(agent, &event, 1, &count));
  CHECK(count == 0);
}

static int test(const char *self, const char *transport)
{
  int down[2], up[2];
  CHECK(pipe(down) == 0 && pipe(up) == 0);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK(dup2(down[0], FROM_TEST) >= 0 && dup2(up[1], TO_TEST) >= 0);
    close(down[0]), close(down[1]), close(up[0]), close(up[1]);
    execl(self, self, transport, "peer", (char *)NULL);
    _exit(127);
  }
  close(down[0]), close(up[1]);

  CHECK(kvf_abi_version() == KVF_ABI_VERSION);
  kvf_agent *agent = start("c test", transport);
  check_bad_input_without_a_peer(agent);

  uint64_t len = 0;
  read_all(up[0], &len, sizeof len);
  uint8_t *metadata = malloc(len);
  CHECK(metadata != NULL);
  read_all(up[0], metadata, len);
  uint64_t peer = 0;
  OK(kvf_agent_connect(agent, metadata, len, &peer));
  free(metadata);

  uint8_t *local = make_cache(2, 0, LOCAL);
  uint64_t region = 0;
  uint32_t index = 99;
  OK(kvf_agent_register(agent, local, (uint64_t)BLOCKS * LOCAL, KVF_MEMORY_HOST, 0, &region, &index));
  CHECK(index == 0);
  uint64_t other = 0;
  OK(kvf_agent_register(agent, local + 9, 5, KVF_MEMORY_HOST, 0, &other, &index));
  CHECK(index == 1);
  kvf_buffer one_region;
  OK(kvf_agent_region_metadata(agent, other, &one_region));
  FAILS(kvf_agent_add_region(agent, peer, one_region.data, one_region.len, &index), KVF_PEER_DIED, "incarnation");
  FAILS(kvf_agent_add_region(agent, peer + 999, one_region.data, one_region.len, &index), KVF_NOT_FOUND, "peer");
  FAILS(kvf_agent_add_region(agent, peer, one_region.data, one_region.len - 1, &index), KVF_CORRUPT, "");
  FAILS(kvf_agent_remove_region(agent, peer, 70000), KVF_NOT_FOUND, "region 70000");
  FAILS(kvf_agent_remove_region(agent, peer + 999, 0), KVF_NOT_FOUND, "peer");
  OK(kvf_buffer_free(&one_region));
  OK(kvf_agent_deregister(agent, other));
  FAILS(kvf_agent_region_metadata(agent, other, &one_region), KVF_NOT_FOUND, "region");

  /* Region 0 fills the blocks' first bytes by list 0, region 1 the rest by list 1, each from past a margin. */
  const uint64_t first = 1500;
  kvf_segment segments[REGIONS] = {
      {.list = 0, .remote_region = 0, .local_offset = 0, .remote_offset = MARGIN, .local_stride = LOCAL,
       .remote_stride = REMOTE, .length = first},
      {.list = 1, .remote_region = 1, .local_offset = first, .remote_offset = MARGIN, .local_stride = LOCAL,
       .remote_stride = REMOTE, .length = LOCAL - first},
  };
  const uint32_t ours[] = {0, 1, 2, 7, 11, 3, 9};
  const uint32_t theirs[] = {4, 5, 6, 0, 1, 11, 2};
  const uint64_t offsets[] = {0, 5, 7};
  char text[2048];

  uint64_t transfer = 0;
  OK(kvf_agent_transfer(agent, peer, KVF_READ, segments, REGIONS, ours, theirs, offsets, 2, 1, &transfer));
  kvf_event done = finish(agent, transfer, text, sizeof text);
  CHECK(done.status == KVF_OK && done.peer == peer && done.user_data == 1);
  CHECK(done.bytes == 5 * first + 2 * (LOCAL - first) && done.operations > 0);
  uint8_t *expected = make_cache(2, 0, LOCAL);
  for (unsigned i = 0; i < 7; i++) {
    unsigned part = i < 5 ? 0 : 1;
    for (uint64_t b = 0; b < segments[part].length; b++) {
      expected[ours[i] * LOCAL + segments[part].local_offset + b] =
          tagged(1, part, theirs[i], (unsigned)(MARGIN + b));
    }
  }
  CHECK(memcmp(local, expected, (size_t)BLOCKS * LOCAL) == 0);

  /* Bad transfers each end with an error of their own, move nothing, and leave the next one alone. */
  const uint32_t beyond[] = {BLOCKS};
  const uint32_t zero[] = {0};
  const uint64_t one[] = {0, 1};
  OK(kvf_agent_transfer(agent, peer, KVF_READ, segments, 1, beyond, zero, one, 1, 2, &transfer));
  CHECK(finish(agent, transfer, text, sizeof text).status == KVF_OUT_OF_RANGE && strstr(text, "12") != NULL);
  OK(kvf_agent_transfer(agent, peer, KVF_READ, segments, 1, zero, beyond, one, 1, 3, &transfer));
  CHECK(finish(agent, transfer, text, sizeof text).status == KVF_OUT_OF_RANGE);
  kvf_segment nowhere = segments[0];
  nowhere.remote_region = 9;
  OK(kvf_agent_transfer(agent, peer, KVF_READ, &nowhere, 1, zero, zero, one, 1, 4, &transfer));
  done = finish(agent, transfer, text, sizeof text);
  CHECK(done.status < 0 && text[0] != '\0' && done.user_data == 4);
  nowhere = segments[0];
  nowhere.local_stride = UINT64_MAX;
  OK(kvf_agent_transfer(agent, peer, KVF_READ, &nowhere, 1, ours, ours, offsets, 1, 5, &transfer));
  CHECK(finish(agent, transfer, text, sizeof text).status < 0 && text[0] != '\0');
  const uint64_t descending[] = {3, 1};
  FAILS(kvf_agent_transfer(agent, peer, 5, segments, 1, zero, zero, one, 1, 6, &transfer), KVF_INVALID_ARGUMENT, "direction 5");
  FAILS(kvf_agent_transfer(agent, peer, KVF_READ, segments, 1, zero, zero, descending, 1, 7, &transfer), KVF_INVALID_ARGUMENT,
        "list_offsets");
  FAILS(kvf_agent_transfer(agent, peer, KVF_READ, NULL, 1, zero, zero, one, 1, 8, &transfer), KVF_INVALID_ARGUMENT, "segments");
  FAILS(kvf_agent_transfer(agent, peer + 999, KVF_READ, segments, 1, zero, zero, one, 1, 9, &transfer), KVF_NOT_FOUND, "peer");
  CHECK(memcmp(local, expected, (size_t)BLOCKS * LOCAL) == 0);

  /* Writing the other way about: our blocks by their ids, theirs by ours. */
  FAILS(kvf_agent_transfer_and_send(agent, peer, KVF_WRITE, segments, REGIONS, theirs, ours, offsets, 2, NULL, 5, 10, &transfer),
        KVF_INVALID_ARGUMENT, "message is NULL");
  OK(kvf_agent_transfer_and_send(agent, peer, KVF_WRITE, segments, REGIONS, theirs, ours, offsets, 2, (const uint8_t *)"there", 5,
                                 10, &transfer));
  OK(kvf_agent_wait_transfer(agent, transfer, GENEROUS_MS));
  OK(kvf_agent_wait_transfer(agent, transfer, 0));
  CHECK(finish(agent, transfer, text, sizeof text).status == KVF_OK);
  CHECK(memcmp(local, expected, (size_t)BLOCKS * LOCAL) == 0);
  write_all(down[1], "s", 1);
  for (unsigned part = 0; part < REGIONS; part++) {
    uint8_t *remote = make_cache(1, part, REMOTE);
    for (unsigned i = part == 0 ? 0 : 5; i < (part == 0 ? 5u : 7u); i++) {
      memcpy(remote + ours[i] * REMOTE + MARGIN, expected + theirs[i] * LOCAL + segments[part].local_offset,
             segments[part].length);
    }
    uint8_t *shown = malloc((size_t)BLOCKS * REMOTE);
    CHECK(shown != NULL);
    read_all(up[0], shown, (size_t)BLOCKS * REMOTE);
    CHECK(memcmp(shown, remote, (size_t)BLOCKS * REMOTE) == 0);
    free(shown);
    free(remote);
  }

  OK(kvf_agent_deregister(agent, region));
  FAILS(kvf_agent_deregister(agent, region), KVF_NOT_FOUND, "region");
  free(local);
  free(expected);
  /* While the peer is there: it ends at once. */
  OK(kvf_agent_transfer(agent, peer, KVF_READ, segments, 1, zero, zero, one, 1, 11, &transfer));
  write_all(down[1], "q", 1);
  check_the_end(agent, transfer);
  kvf_buffer buffer;
  FAILS(kvf_agent_metadata(agent, &buffer), KVF_SHUT_DOWN, "shut down");
  OK(kvf_agent_free(agent));
  FAILS(kvf_agent_free(agent), KVF_NOT_FOUND, "no live agent");

  int ended = 0;
  CHECK(waitpid(child, &ended, 0) == child);
  CHECK(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
  close(down[1]), close(up[0]);
  puts("every byte was right");
  return 0;
}

int main(int argc, char **argv)
{
  if (argc == 3 && strcmp(argv[2], "peer") == 0) {
    return serve(argv[1]);
  }
  CHECK(argc == 2);
  return test(argv[0], argv[1]);
}
