/* Two small engines that are not vLLM, in C: one hands a finished prefill's KV cache over, the other one fetches it.
 *
 *   cc examples/engine.c -o engine $(pkg-config --cflags --libs kvferry)
 *   ./engine prefill | ./engine decode
 *
 * The pipe stands for whatever carries a request's kv_transfer_params in practice: a proxy, an HTTP answer, a file. The
 * cache itself goes past it, from the one's memory into the other's. See docs/c-abi.md for the order of calls. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <kvferry.h>

#include "msgpack.h"

enum { LAYERS = 4, BLOCKS = 32, BLOCK_TOKENS = 16, HEADS = 2, CONTENT = 64 }; /* CONTENT: bytes per token and head */
enum { HEAD_BYTES = BLOCK_TOKENS * CONTENT, BLOCK_BYTES = HEADS * HEAD_BYTES, LAYER_BYTES = BLOCKS * BLOCK_BYTES };
enum { PROMPT_BLOCKS = 5, PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS, SECONDS = 60 };

static uint8_t cache[LAYERS * LAYER_BYTES];

static void ok(int32_t status, const char *what)
{
  if (status != KVF_OK) {
    char text[2048];
    kvf_last_error(text, sizeof text, NULL);
    fprintf(stderr, "%s: %s: %s\n", what, kvf_status_name(status), text);
    exit(1);
  }
}

/* What a model would compute for a prompt: a byte of its n-th block. Both engines can tell it here. */
static uint8_t computed(const char *prompt, unsigned layer, unsigned block, unsigned byte)
{
  return (uint8_t)((unsigned)prompt[0] * 151 + layer * 83 + block * 29 + byte * 7 + byte / 256);
}

/* An engine of one rank. Engines of several ranks have a worker in each rank's process and one scheduler;
 * metadata, steps and reports travel between them as bytes. */
typedef struct {
  kvf_worker *worker;
  kvf_scheduler *scheduler;
} engine;

static void put_groups(packed *to)
{
  put_text(to, "groups"), put_array(to, 1), put_map(to, 2);
  put_text(to, "kind"), put_text(to, "full");
  put_text(to, "block_size"), put_number(to, BLOCK_TOKENS);
}

static void put_area(packed *to, unsigned layer)
{
  char name[16];
  snprintf(name, sizeof name, "layer.%u", layer);
  put_map(to, 14);
  put_text(to, "layer"), put_text(to, name);
  put_text(to, "part"), put_text(to, "kv");
  put_text(to, "group"), put_number(to, 0);
  put_text(to, "region"), put_number(to, 0);
  put_text(to, "offset"), put_number(to, (uint64_t)layer * LAYER_BYTES);
  put_text(to, "num_blocks"), put_number(to, BLOCKS);
  put_text(to, "block_stride"), put_number(to, BLOCK_BYTES);
  put_text(to, "heads"), put_number(to, HEADS);
  put_text(to, "first_head"), put_number(to, 0);
  put_text(to, "total_heads"), put_number(to, HEADS);
  put_text(to, "head_stride"), put_number(to, HEAD_BYTES);
  put_text(to, "tokens"), put_number(to, BLOCK_TOKENS);
  put_text(to, "token_stride"), put_number(to, CONTENT);
  put_text(to, "content"), put_number(to, CONTENT);
}

static engine start(const char *name)
{
  engine e;
  packed config = {.len = 0};
  put_map(&config, 3);
  put_text(&config, "engine_id"), put_text(&config, name);
  put_text(&config, "verdict_timeout_ms"), put_number(&config, 8000);
  /* What both engines must share; a difference ends in a failed request that names it. */
  put_text(&config, "compat"), put_array(&config, 1), put_array(&config, 2);
  put_text(&config, "model"), put_text(&config, "example");
  ok(kvf_worker_start(config.bytes, config.len, &e.worker), "start the worker");

  uint32_t region;
  ok(kvf_worker_register(e.worker, cache, sizeof cache, KVF_MEMORY_HOST, 0, &region), "register");
  packed geometry = {.len = 0};
  put_map(&geometry, 2);
  put_groups(&geometry);
  put_text(&geometry, "areas"), put_array(&geometry, LAYERS);
  for (unsigned layer = 0; layer < LAYERS; layer++) put_area(&geometry, layer);
  ok(kvf_worker_set_geometry(e.worker, geometry.bytes, geometry.len), "set the geometry");

  packed settings = {.len = 0};
  put_map(&settings, 4);
  put_text(&settings, "engine_id"), put_text(&settings, name);
  put_groups(&settings);
  /* Between hosts, leave the host out to have an address found. */
  put_text(&settings, "host"), put_text(&settings, "127.0.0.1");
  put_text(&settings, "port"), put_number(&settings, 0);
  ok(kvf_scheduler_start(settings.bytes, settings.len, &e.scheduler), "start the scheduler");

  kvf_buffer metadata, host;
  uint16_t port;
  ok(kvf_worker_metadata(e.worker, &metadata), "metadata");
  const kvf_rank_metadata rank = {.pp_rank = 0, .tp_rank = 0, .data = metadata.data, .len = metadata.len};
  ok(kvf_scheduler_serve(e.scheduler, &rank, 1, &host, &port), "serve");
  kvf_buffer_free(&metadata);
  kvf_buffer_free(&host);
  return e;
}

static void stop(engine e)
{
  /* The worker first: it uses the cache's memory. */
  ok(kvf_worker_free(e.worker), "free the worker");
  ok(kvf_scheduler_free(e.scheduler), "free the scheduler");
}

/* What an engine does between two runs of its model. Nothing here waits for the network. `*outcome` gets what has become
 * known as a msgpack map, empty when nothing has. */
static void step(engine e, kvf_buffer *outcome)
{
  uint8_t pending;
  ok(kvf_scheduler_has_pending(e.scheduler, &pending), "pending");
  if (pending) {
    kvf_buffer work;
    ok(kvf_scheduler_step(e.scheduler, &work), "step");
    ok(kvf_worker_submit(e.worker, work.data, work.len), "submit");
    kvf_buffer_free(&work);
  }
  kvf_buffer report;
  ok(kvf_worker_poll(e.worker, &report), "poll");
  *outcome = (kvf_buffer){.len = 0};
  if (report.len > 0) {
    /* With several ranks, every rank's report: the scheduler says when all are done. */
    ok(kvf_scheduler_report(e.scheduler, report.data, report.len, outcome), "report");
    kvf_buffer_free(&report);
  }
}

/* Steps until the list `key` of an outcome has the request; with `cause` also when it has failed. Returns 1 for that, and
 * copies why. */
static int until(engine e, const char *key, const char *request, char *cause, size_t cause_len)
{
  for (int waits = 0; waits < SECONDS * 1000; waits++) {
    kvf_buffer outcome;
    uint64_t count;
    step(e, &outcome);
    if (outcome.len > 0) {
      const unpacked map = {outcome.data, outcome.data + outcome.len};
      unpacked failed = value_of(map, "failed_recving");
      head(&failed, &count);
      for (; cause != NULL && count > 0; count--, skip(&failed)) {
        if (is_text(value_of(failed, "request"), request)) {
          uint64_t len;
          unpacked text = value_of(failed, "message");
          head(&text, &len);
          snprintf(cause, cause_len, "%.*s", (int)len, (const char *)take(&text, len));
          kvf_buffer_free(&outcome);
          return 1;
        }
      }
      unpacked ended = value_of(map, key);
      head(&ended, &count);
      for (; count > 0; count--, skip(&ended)) {
        if (is_text(ended, request)) {
          kvf_buffer_free(&outcome);
          return 0;
        }
      }
    }
    kvf_buffer_free(&outcome);
    /* In practice the model runs here. */
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  }
  fprintf(stderr, "the other engine did not do its part in time\n");
  exit(1);
}

/* Computes a prompt and hands it over: its blocks must stay until an outcome says that its sending is over. */
static void hand_over(engine e, const char *prompt, const uint32_t *blocks)
{
  for (unsigned i = 0; i < LAYERS * PROMPT_BLOCKS * BLOCK_BYTES; i++) {
    const unsigned layer = i / (PROMPT_BLOCKS * BLOCK_BYTES), block = i / BLOCK_BYTES % PROMPT_BLOCKS;
    cache[layer * LAYER_BYTES + blocks[block] * BLOCK_BYTES + i % BLOCK_BYTES] =
        computed(prompt, layer, block, i % BLOCK_BYTES);
  }
  packed asked = {.len = 0};
  put_map(&asked, 1);
  put_text(&asked, "do_remote_decode"), put_true(&asked);
  const uint64_t offsets[] = {0, PROMPT_BLOCKS};
  uint8_t keep;
  kvf_buffer params;
  ok(kvf_scheduler_finished(e.scheduler, prompt, strlen(prompt), asked.bytes, asked.len, KVF_COMPLETE, blocks, offsets, 1,
                            PROMPT_TOKENS, &keep, &params),
     "finished");
  const uint32_t len = (uint32_t)params.len;
  fwrite(&len, sizeof len, 1, stdout);
  fwrite(params.data, 1, params.len, stdout);
  fflush(stdout);
  kvf_buffer_free(&params);
}

static void prefill(void)
{
  engine e = start("prefill");
  hand_over(e, "one", (const uint32_t[]){3, 9, 27, 17, 19});
  hand_over(e, "two", (const uint32_t[]){4, 8, 16, 31, 2});
  until(e, "finished_sending", "one", NULL, 0);
  fprintf(stderr, "prefill: the blocks of one are free again\n");
  until(e, "finished_sending", "two", NULL, 0);
  fprintf(stderr, "prefill: the blocks of two are free again\n");
  stop(e);
}

static packed receive(void)
{
  packed params = {.len = 0};
  uint32_t len;
  if (fread(&len, sizeof len, 1, stdin) != 1 || len > sizeof params.bytes ||
      fread(params.bytes, 1, len, stdin) != len) {
    fprintf(stderr, "the prefill engine sent no kv_transfer_params\n");
    exit(1);
  }
  params.len = len;
  return params;
}

/* Fetches a prompt into `blocks`. Returns 1 and why if it failed; the prompt is then to be computed here. */
static int load(engine e, const char *request, const packed *params, const uint32_t *blocks, char *cause, size_t cap)
{
  const size_t name = strlen(request);
  const uint64_t offsets[] = {0, PROMPT_BLOCKS};
  uint64_t tokens;
  uint8_t asynchronous;
  ok(kvf_scheduler_arrived(e.scheduler, request, name, params->bytes, params->len), "arrived");
  /* Up to here the request only waits; the handshake goes on meanwhile, and heartbeats keep the prefill's lease. */
  ok(kvf_scheduler_matched(e.scheduler, request, name, params->bytes, params->len, PROMPT_TOKENS, 0, &tokens,
                           &asynchronous),
     "matched");
  ok(kvf_scheduler_allocated(e.scheduler, request, name, params->bytes, params->len, blocks, offsets, 1, PROMPT_TOKENS,
                             tokens),
     "allocated");
  return until(e, "finished_recving", request, cause, cap);
}

static void decode(void)
{
  engine e = start("decode");
  const packed one = receive(), two = receive();
  const uint32_t blocks[] = {11, 12, 5, 30, 1};
  char cause[1024];

  if (load(e, "request 1", &one, blocks, cause, sizeof cause)) {
    fprintf(stderr, "request 1 failed: %s\n", cause);
    exit(1);
  }
  for (unsigned i = 0; i < LAYERS * PROMPT_BLOCKS * BLOCK_BYTES; i++) {
    const unsigned layer = i / (PROMPT_BLOCKS * BLOCK_BYTES), block = i / BLOCK_BYTES % PROMPT_BLOCKS;
    const uint8_t found = cache[layer * LAYER_BYTES + blocks[block] * BLOCK_BYTES + i % BLOCK_BYTES];
    if (found != computed("one", layer, block, i % BLOCK_BYTES)) {
      fprintf(stderr, "layer %u, block %u: byte %u is wrong\n", layer, blocks[block], i % BLOCK_BYTES);
      exit(1);
    }
  }
  printf("decode: %d bytes of one are here, every byte right\n", LAYERS * PROMPT_BLOCKS * BLOCK_BYTES);

  /* The same params with a request that the prefill engine does not know: "one" becomes "nno". */
  packed unknown = one;
  unpacked id = value_of((unpacked){unknown.bytes, unknown.bytes + unknown.len}, "remote_request_id");
  uint64_t id_len;
  head(&id, &id_len);
  memcpy(unknown.bytes + (id.at - unknown.bytes), "nno", 3);
  if (!load(e, "request 2", &unknown, (const uint32_t[]){7, 8, 9, 10, 13}, cause, sizeof cause)) {
    fprintf(stderr, "request 2 was loaded from nowhere\n");
    exit(1);
  }
  printf("decode: an unknown request fails by itself: %s\n", cause);

  /* A request that ends before it was loaded: the prefill engine's blocks are given back at once. */
  uint8_t keep;
  kvf_buffer answer, outcome;
  const uint64_t nothing[] = {0, 0};
  ok(kvf_scheduler_arrived(e.scheduler, "request 3", 9, two.bytes, two.len), "arrived");
  ok(kvf_scheduler_finished(e.scheduler, "request 3", 9, two.bytes, two.len, KVF_ABORTED, NULL, nothing, 1, 0, &keep,
                            &answer),
     "finished");
  kvf_buffer_free(&answer);
  step(e, &outcome);
  kvf_buffer_free(&outcome);
  while (getchar() != EOF) {
    /* until the prefill engine has ended */
  }
  stop(e);
}

int main(int argc, char **argv)
{
  if (argc == 2 && strcmp(argv[1], "prefill") == 0) {
    prefill();
  } else if (argc == 2 && strcmp(argv[1], "decode") == 0) {
    decode();
  } else {
    fprintf(stderr, "usage: engine prefill | engine decode\n");
    return 1;
  }
  return 0;
}
