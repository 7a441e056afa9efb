/*
 * An engine of one rank keeps conversations for their next turns and evicts them when it is told to, through the C
 * ABI: the oldest first, and their blocks are free when reports say so.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdint.h>

#include "../../examples/msgpack.h"
#include "check.h"

enum { BLOCKS = 16, BLOCK_TOKENS = 16, CONTENT = 64, BLOCK_BYTES = BLOCK_TOKENS * CONTENT };

/* Long enough for a busy machine and a memory checker; nothing waits so long when all goes well. */
enum { GENEROUS_MS = 120000 };

static uint8_t cache[BLOCKS * BLOCK_BYTES];

static void put_groups(packed *to)
{
  put_text(to, "groups"), put_array(to, 1), put_map(to, 2);
  put_text(to, "kind"), put_text(to, "full");
  put_text(to, "block_size"), put_number(to, BLOCK_TOKENS);
}

static void put_numbers(packed *to, const char *key, uint64_t number)
{
  put_text(to, key), put_number(to, number);
}

static kvf_worker *start_worker(void)
{
  kvf_worker *worker;
  packed config = {.len = 0}, geometry = {.len = 0};
  put_map(&config, 2);
  put_text(&config, "engine_id"), put_text(&config, "decode");
  put_text(&config, "transport"), put_text(&config, "shm");
  OK(kvf_worker_start(config.bytes, config.len, &worker));
  uint32_t region;
  OK(kvf_worker_register(worker, cache, sizeof cache, KVF_MEMORY_HOST, 0, &region));
  put_map(&geometry, 2);
  put_groups(&geometry);
  put_text(&geometry, "areas"), put_array(&geometry, 1), put_map(&geometry, 14);
  put_text(&geometry, "layer"), put_text(&geometry, "layer.0");
  put_text(&geometry, "part"), put_text(&geometry, "kv");
  put_numbers(&geometry, "group", 0), put_numbers(&geometry, "region", region), put_numbers(&geometry, "offset", 0);
  put_numbers(&geometry, "num_blocks", BLOCKS), put_numbers(&geometry, "block_stride", BLOCK_BYTES);
  put_numbers(&geometry, "heads", 1), put_numbers(&geometry, "first_head", 0);
  put_numbers(&geometry, "total_heads", 1), put_numbers(&geometry, "head_stride", BLOCK_BYTES);
  put_numbers(&geometry, "tokens", BLOCK_TOKENS), put_numbers(&geometry, "token_stride", CONTENT);
  put_numbers(&geometry, "content", CONTENT);
  OK(kvf_worker_set_geometry(worker, geometry.bytes, geometry.len));
  return worker;
}

static kvf_scheduler *start_scheduler(kvf_worker *worker)
{
  kvf_scheduler *scheduler;
  packed config = {.len = 0};
  put_map(&config, 7);
  put_text(&config, "engine_id"), put_text(&config, "decode");
  put_groups(&config);
  put_text(&config, "host"), put_text(&config, "127.0.0.1");
  put_numbers(&config, "port", 0);
  put_text(&config, "multi_turn"), put_true(&config);
  put_numbers(&config, "num_blocks", BLOCKS), put_numbers(&config, "history_percent", 100);
  OK(kvf_scheduler_start(config.bytes, config.len, &scheduler));
  kvf_buffer metadata, host;
  uint16_t port;
  OK(kvf_worker_metadata(worker, &metadata));
  const kvf_rank_metadata rank = {.pp_rank = 0, .tp_rank = 0, .data = metadata.data, .len = metadata.len};
  OK(kvf_scheduler_serve(scheduler, &rank, 1, &host, &port));
  OK(kvf_buffer_free(&metadata));
  OK(kvf_buffer_free(&host));
  return scheduler;
}

/* A request that was decoded here ends; whether its block is kept for the next turn. */
static int ends(kvf_scheduler *scheduler, const char *request, uint32_t block)
{
  packed params = {.len = 0};
  put_map(&params, 1);
  put_text(&params, "do_remote_prefill"), put_true(&params);
  const uint64_t offsets[] = {0, 1};
  uint8_t keep;
  kvf_buffer answer;
  OK(kvf_scheduler_finished(scheduler, request, strlen(request), params.bytes, params.len, KVF_COMPLETE, &block, offsets, 1,
                            BLOCK_TOKENS, &keep, &answer));
  CHECK((answer.len > 0) == keep);
  OK(kvf_buffer_free(&answer));
  return keep;
}

/* Waits until the workers' reports have so many requests in `finished_sending`; each must be the next of `expected`. */
static void wait_for(kvf_scheduler *scheduler, kvf_worker *worker, const char **expected, unsigned count)
{
  kvf_buffer work, report, outcome;
  OK(kvf_scheduler_step(scheduler, &work));
  OK(kvf_worker_submit(worker, work.data, work.len));
  OK(kvf_buffer_free(&work));
  for (unsigned found = 0; found < count;) {
    OK(kvf_worker_wait(worker, GENEROUS_MS, &report));
    CHECK(report.len > 0);
    OK(kvf_scheduler_report(scheduler, report.data, report.len, &outcome));
    OK(kvf_buffer_free(&report));
    uint64_t ended;
    unpacked list = value_of((unpacked){outcome.data, outcome.data + outcome.len}, "finished_sending");
    CHECK(head(&list, &ended) == ARRAY);
    for (; ended > 0; ended--, skip(&list)) {
      CHECK(found < count);
      CHECK(is_text(list, expected[found]));
      found++;
    }
    OK(kvf_buffer_free(&outcome));
  }
}

/* The last reports can be taken after a shutdown, and then a wait says that none will come. */
static void check_the_end(kvf_worker *worker)
{
  kvf_buffer report = {NULL, 0, 0};
  OK(kvf_worker_shutdown(worker, GENEROUS_MS));
  int32_t status;
  while ((status = kvf_worker_wait(worker, GENEROUS_MS, &report)) == KVF_OK) {
    CHECK(report.len > 0);
    OK(kvf_buffer_free(&report));
  }
  FAILS(status, KVF_SHUT_DOWN, "every report was taken");
  FAILS(kvf_worker_wait(worker, 0, &report), KVF_SHUT_DOWN, "every report was taken");
  OK(kvf_worker_poll(worker, &report));
  CHECK(report.len == 0);
}

int main(void)
{
  kvf_worker *worker = start_worker();
  kvf_scheduler *scheduler = start_scheduler(worker);
  uint64_t count = 77;
  OK(kvf_scheduler_forget_histories(scheduler, UINT64_MAX, &count));
  CHECK(count == 0);
  CHECK(ends(scheduler, "first", 1) && ends(scheduler, "second", 2) && ends(scheduler, "third", 3));
  wait_for(scheduler, worker, NULL, 0);

  OK(kvf_scheduler_forget_histories(scheduler, 0, &count));
  CHECK(count == 0);
  OK(kvf_scheduler_forget_histories(scheduler, 1, &count));
  CHECK(count == 1);
  uint8_t pending;
  OK(kvf_scheduler_has_pending(scheduler, &pending));
  CHECK(pending == 1);
  OK(kvf_scheduler_forget_histories(scheduler, 0, &count));
  CHECK(count == 1);
  wait_for(scheduler, worker, (const char *[]){"first"}, 1);
  /* Its id and its block are free for another one, which is the youngest. */
  CHECK(ends(scheduler, "first", 1));
  OK(kvf_scheduler_forget_histories(scheduler, 2, &count));
  CHECK(count == 2);
  wait_for(scheduler, worker, (const char *[]){"second", "third"}, 2);
  OK(kvf_scheduler_forget_histories(scheduler, UINT64_MAX, &count));
  CHECK(count == 1);
  wait_for(scheduler, worker, (const char *[]){"first"}, 1);

  FAILS(kvf_scheduler_forget_histories(scheduler, 1, NULL), KVF_INVALID_ARGUMENT, "count");
  FAILS(kvf_scheduler_forget_histories(NULL, 1, &count), KVF_INVALID_ARGUMENT, NULL);
  FAILS(kvf_scheduler_forget_histories((kvf_scheduler *)worker, 1, &count), KVF_INVALID_ARGUMENT, NULL);
  check_the_end(worker);
  count = 77;
  OK(kvf_worker_free(worker));
  OK(kvf_scheduler_free(scheduler));
  CHECK(kvf_scheduler_forget_histories(scheduler, 1, &count) == KVF_NOT_FOUND);
  CHECK(count == 77);
  printf("every conversation was evicted in its turn\n");
  return 0;
}
