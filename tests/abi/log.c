/*
 * A log callback that calls the library is refused and delays nobody, and one that does not return ends the process with a line
 * that says so.
 */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>
#include <unwind.h>

#include "check.h"

/* Long enough for a busy machine and a memory checker; nothing waits so long when all goes well. */
enum { GENEROUS_MS = 120000 };

/* {"transport": "tcp"} in msgpack. */
static const uint8_t config[] = "\x81\xa9transport\xa3tcp";
enum { CONFIG_LEN = sizeof config - 1 };

static pthread_t caller;
static _Atomic(kvf_agent *) asked;
static atomic_int calls_of_others;

/* Asks the agent whose thread it is called on. */
static void ask(uint32_t level, const char *target, const char *message, void *user)
{
  CHECK(level >= 1 && level <= 5 && target != NULL && message != NULL && user == &asked);
  kvf_agent *agent = atomic_load(&asked);
  if (agent == NULL || pthread_equal(pthread_self(), caller)) {
    return;
  }
  kvf_buffer buffer = {NULL, 0, 0};
  FAILS(kvf_agent_stats(agent, &buffer), KVF_INVALID_ARGUMENT, "log callback");
  FAILS(kvf_agent_free(agent), KVF_INVALID_ARGUMENT, "log callback");
  FAILS(kvf_buffer_free(&buffer), KVF_INVALID_ARGUMENT, "log callback");
  FAILS(kvf_log_unset(), KVF_INVALID_ARGUMENT, "log callback");
  CHECK(strcmp(kvf_status_name(KVF_INVALID_ARGUMENT), "invalid_argument") == 0);
  CHECK(kvf_abi_version() == KVF_ABI_VERSION);
  atomic_fetch_add(&calls_of_others, 1);
}

static void check_calls_from_inside(void)
{
  caller = pthread_self();
  OK(kvf_log_set(ask, &asked, 5));
  kvf_agent *agent = NULL, *other = NULL;
  OK(kvf_agent_start(config, CONFIG_LEN, &agent));
  OK(kvf_agent_start(config, CONFIG_LEN, &other));
  atomic_store(&asked, agent);
  kvf_buffer metadata;
  OK(kvf_agent_metadata(other, &metadata));
  uint64_t peer = 0;
  OK(kvf_agent_connect(agent, metadata.data, metadata.len, &peer));
  OK(kvf_buffer_free(&metadata));
  for (int connected = 0; !connected;) {
    kvf_event event;
    size_t count = 0;
    OK(kvf_agent_wait(agent, GENEROUS_MS, &event, 1, &count));
    CHECK(count == 1);
    connected = event.kind == KVF_EVENT_PEER_CONNECTED;
  }
  CHECK(atomic_load(&calls_of_others) > 0);
  /* Outside of the callback everything goes on, on this thread too. */
  kvf_buffer stats;
  OK(kvf_agent_stats(agent, &stats));
  OK(kvf_buffer_free(&stats));
  OK(kvf_agent_free(agent));
  atomic_store(&asked, NULL);
  OK(kvf_agent_free(other));
  OK(kvf_log_unset());
}

/* As a C++ exception would. */
static void do_not_return(uint32_t level, const char *target, const char *message, void *user)
{
  static struct _Unwind_Exception exception;
  (void)level, (void)target, (void)message, (void)user;
  _Unwind_RaiseException(&exception);
  _exit(3);
}

static void check_a_callback_that_does_not_return(void)
{
  int from[2];
  CHECK(pipe(from) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK(dup2(from[1], STDERR_FILENO) >= 0);
    kvf_agent *agent = NULL;
    OK(kvf_log_set(do_not_return, NULL, 5));
    kvf_agent_start(config, CONFIG_LEN, &agent);
    _exit(4);
  }
  close(from[1]);
  char said[4096] = "";
  size_t len = 0;
  for (ssize_t more = 1; more > 0 && len < sizeof said - 1; len += (size_t)more) {
    more = read(from[0], said + len, sizeof said - 1 - len);
    CHECK(more >= 0);
  }
  close(from[0]);
  int ended;
  CHECK(waitpid(child, &ended, 0) == child);
  if (!WIFSIGNALED(ended) || WTERMSIG(ended) != SIGABRT || strstr(said, "the log callback did not return") == NULL) {
    fprintf(stderr, "ended with %x and said: %s\n", (unsigned)ended, said);
    exit(1);
  }
}

int main(void)
{
  /* First, while this process has no threads. */
  check_a_callback_that_does_not_return();
  check_calls_from_inside();
  puts("every call from the callback was refused");
  return 0;
}
