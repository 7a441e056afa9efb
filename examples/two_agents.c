/* Two kvferry agents in one process: one reads scattered blocks from the other's memory.
 * cc examples/two_agents.c -o two_agents $(pkg-config --cflags --libs kvferry) */
#include <kvferry.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 64, BLOCK_BYTES = 4096 };

static void check(int32_t status, const char *what)
{
  if (status != KVF_OK) {
    char text[512];
    kvf_last_error(text, sizeof text, NULL);
    fprintf(stderr, "%s: %s: %s\n", what, kvf_status_name(status), text);
    exit(1);
  }
}

int main(void)
{
  static uint8_t source[BLOCKS][BLOCK_BYTES], target[BLOCKS][BLOCK_BYTES];
  for (unsigned block = 0; block < BLOCKS; block++) {
    for (unsigned byte = 0; byte < BLOCK_BYTES; byte++) {
      source[block][byte] = (uint8_t)(block * 31 + byte * 7);
    }
  }

  const uint8_t defaults[] = {0x80}; /* an empty msgpack map */
  kvf_agent *producer, *consumer;
  check(kvf_agent_start(defaults, sizeof defaults, &producer), "start");
  check(kvf_agent_start(defaults, sizeof defaults, &consumer), "start");

  uint64_t region;
  uint32_t index;
  check(kvf_agent_register(producer, source, sizeof source, KVF_MEMORY_HOST, 0, &region, &index), "register");
  check(kvf_agent_register(consumer, target, sizeof target, KVF_MEMORY_HOST, 0, &region, &index), "register");

  /* In practice the metadata travels between hosts by any means. */
  kvf_buffer metadata;
  uint64_t peer;
  check(kvf_agent_metadata(producer, &metadata), "metadata");
  check(kvf_agent_connect(consumer, metadata.data, metadata.len, &peer), "connect");
  kvf_buffer_free(&metadata);

  /* Block i of the lists copies BLOCK_BYTES from the producer's block remote[i] to the consumer's block local[i]. */
  const kvf_segment whole_block = {.local_stride = BLOCK_BYTES, .remote_stride = BLOCK_BYTES, .length = BLOCK_BYTES};
  const uint32_t local[] = {3, 1, 4, 15, 9}, remote[] = {26, 5, 35, 8, 60};
  const uint64_t offsets[] = {0, 5};
  uint64_t transfer;
  check(kvf_agent_transfer(consumer, peer, KVF_READ, &whole_block, 1, local, remote, offsets, 1, 0, &transfer), "transfer");

  kvf_event event = {0};
  for (int waits = 0; event.kind != KVF_EVENT_TRANSFER_DONE && waits < 60; waits++) {
    size_t count;
    check(kvf_agent_wait(consumer, 1000, &event, 1, &count), "wait");
  }
  if (event.kind != KVF_EVENT_TRANSFER_DONE || event.status != KVF_OK) {
    fprintf(stderr, "the transfer failed: %s\n", kvf_status_name(event.status));
    return 1;
  }
  for (unsigned i = 0; i < 5; i++) {
    if (memcmp(target[local[i]], source[remote[i]], BLOCK_BYTES) != 0) {
      return 1;
    }
  }
  printf("kvferry %s: %llu bytes in %llu operations, every byte right\n", kvf_version(), (unsigned long long)event.bytes,
         (unsigned long long)event.operations);
  check(kvf_agent_free(consumer), "free");
  check(kvf_agent_free(producer), "free");
  return 0;
}
