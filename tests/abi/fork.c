/*
 * Processes that are forked off while other threads are in calls are answered: handles, buffers and the log.
 *
 * fork.c NUMBER forks so many.
 */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* A forked process that hangs is ended after so long; nothing takes long when all goes well. */
enum { GENEROUS_S = 60 };

static atomic_int stop;

/* {"ranks": [{"pp": 0, "tp": 0}]} in msgpack. */
static const uint8_t config[] = "\x81\xa5ranks\x91\x82\xa2pp\x00\xa2tp\x00";
enum { CONFIG_LEN = sizeof config - 1 };

static kvf_aggregator *start(void)
{
  kvf_aggregator *aggregator;
  OK(kvf_aggregator_start(config, CONFIG_LEN, &aggregator));
  return aggregator;
}

static void ignore(uint32_t level, const char *target, const char *message, void *user)
{
  (void)level, (void)target, (void)message, (void)user;
}

/* Is in calls that lock the tables of handles and buffers, most of the time. */
static void *make_things(void *unused)
{
  while (!atomic_load(&stop)) {
    kvf_aggregator *aggregator = start();
    kvf_buffer outcome;
    OK(kvf_aggregator_take(aggregator, &outcome));
    OK(kvf_buffer_free(&outcome));
    OK(kvf_aggregator_free(aggregator));
  }
  return unused;
}

/* Replaces the log callback all the time. */
static void *set_logs(void *unused)
{
  while (!atomic_load(&stop)) {
    OK(kvf_log_set(ignore, NULL, 5));
    OK(kvf_log_unset());
  }
  return unused;
}

/* In the forked process. Returns the line of the first call that gave another status than expected, or 0. Nothing that may lock
 * is called but the library. */
static int ask(kvf_aggregator *parents, kvf_buffer *copied)
{
#define GIVES(call, status)   \
  do {                        \
    if ((call) != (status)) { \
      return __LINE__;        \
    }                         \
  } while (0)
  kvf_buffer outcome;
  kvf_aggregator *own;
  char text[256];
  GIVES(kvf_aggregator_take(parents, &outcome), KVF_SHUT_DOWN);
  GIVES(kvf_last_error(text, sizeof text, NULL), KVF_OK);
  if (strstr(text, "stayed there at the fork") == NULL) {
    return __LINE__;
  }
  GIVES(kvf_aggregator_free(parents), KVF_SHUT_DOWN);
  GIVES(kvf_buffer_free(copied), KVF_OK);
  if (copied->data != NULL) {
    return __LINE__;
  }
  GIVES(kvf_aggregator_start(config, CONFIG_LEN, &own), KVF_OK);
  GIVES(kvf_aggregator_take(own, &outcome), KVF_OK);
  kvf_buffer again = outcome;
  GIVES(kvf_buffer_free(&outcome), KVF_OK);
  GIVES(kvf_buffer_free(&again), KVF_NOT_FOUND);
  GIVES(kvf_aggregator_free(own), KVF_OK);
  GIVES(kvf_aggregator_free(own), KVF_NOT_FOUND);
  GIVES(kvf_log_set(ignore, NULL, 5), KVF_OK);
  GIVES(kvf_log_unset(), KVF_OK);
  return 0;
}

int main(int argc, char **argv)
{
  CHECK(argc == 2);
  kvf_aggregator *aggregator = start();
  kvf_buffer outcome;
  OK(kvf_aggregator_take(aggregator, &outcome));
  CHECK(outcome.len > 0);

  pthread_t threads[3];
  CHECK(pthread_create(&threads[0], NULL, make_things, NULL) == 0);
  CHECK(pthread_create(&threads[1], NULL, make_things, NULL) == 0);
  CHECK(pthread_create(&threads[2], NULL, set_logs, NULL) == 0);
  const int forks = atoi(argv[1]);
  for (int number = 0; number < forks; number++) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(GENEROUS_S);
      _exit(ask(aggregator, &outcome));
    }
    int ended;
    CHECK(waitpid(child, &ended, 0) == child);
    if (!WIFEXITED(ended) || WEXITSTATUS(ended) != 0) {
      fprintf(stderr, "fork %d of %d: %s %d\n", number, forks,
              WIFEXITED(ended) ? "another answer than expected in line" : "it hung or crashed, signal",
              WIFEXITED(ended) ? WEXITSTATUS(ended) : WTERMSIG(ended));
      return 1;
    }
  }
  atomic_store(&stop, 1);
  for (int number = 0; number < 3; number++) {
    CHECK(pthread_join(threads[number], NULL) == 0);
  }
  OK(kvf_buffer_free(&outcome));
  OK(kvf_aggregator_free(aggregator));
  puts("every forked process was answered");
  return 0;
}
