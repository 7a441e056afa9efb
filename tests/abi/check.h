/* What the C tests share: checks that end the test with a line that says what was wrong. */
#ifndef KVFERRY_TEST_CHECK_H
#define KVFERRY_TEST_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry.h>

static void fail(const char *file, int line, const char *what)
{
  char text[2048];
  size_t len = 0;
  kvf_last_error(text, sizeof text, &len);
  fprintf(stderr, "%s:%d: %s\n  last error: %s\n", file, line, what, text);
  exit(1);
}

/* Fails unless the condition holds. */
#define CHECK(condition)                        \
  do {                                          \
    if (!(condition)) {                         \
      fail(__FILE__, __LINE__, #condition);     \
    }                                           \
  } while (0)

static void expect(const char *file, int line, const char *call, int32_t status, int32_t expected, const char *word)
{
  char text[2048];
  char what[4096];
  size_t len = 0;
  CHECK(kvf_last_error(text, sizeof text, &len) == KVF_OK);
  if (status != expected) {
    snprintf(what, sizeof what, "%s gave %s, expected %s", call, kvf_status_name(status), kvf_status_name(expected));
    fail(file, line, what);
  }
  if (word != NULL && strstr(text, word) == NULL) {
    snprintf(what, sizeof what, "%s: the text lacks \"%s\"", call, word);
    fail(file, line, what);
  }
}

/* Fails unless the call succeeds. */
#define OK(call) expect(__FILE__, __LINE__, #call, (call), KVF_OK, NULL)

/* Fails unless the call gives this status and its text has this word in it. */
#define FAILS(call, status, word) expect(__FILE__, __LINE__, #call, (call), (status), (word))

#endif
