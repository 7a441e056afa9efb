/* As much msgpack (https://msgpack.org) as a host of kvferry needs, for programs that have no library for it:
 * maps of texts and numbers to write, and any value to read. */
#ifndef EXAMPLE_MSGPACK_H
#define EXAMPLE_MSGPACK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- writing; a map of n entries is followed by n times a key and a value */

typedef struct {
  uint8_t bytes[8192];
  size_t len;
} packed;

static void put(packed *to, const void *bytes, size_t len)
{
  if (len > sizeof to->bytes - to->len) {
    fprintf(stderr, "the message is longer than %zu bytes\n", sizeof to->bytes);
    exit(1);
  }
  memcpy(to->bytes + to->len, bytes, len);
  to->len += len;
}

/* A marker, and `count` in two bytes behind it, the most significant first. */
static void put_counted(packed *to, uint8_t marker, size_t count)
{
  const uint8_t head[] = {marker, (uint8_t)(count >> 8), (uint8_t)count};
  put(to, head, sizeof head);
}

static void put_map(packed *to, unsigned entries) { put_counted(to, 0xde, entries); }
static void put_array(packed *to, unsigned entries) { put_counted(to, 0xdc, entries); }

static void put_text(packed *to, const char *text)
{
  put_counted(to, 0xda, strlen(text));
  put(to, text, strlen(text));
}

static void put_number(packed *to, uint64_t number)
{
  uint8_t head[9] = {0xcf};
  for (int byte = 0; byte < 8; byte++) {
    head[1 + byte] = (uint8_t)(number >> (56 - 8 * byte));
  }
  put(to, head, sizeof head);
}

static void put_true(packed *to) { put(to, "\xc3", 1); }

/* --- reading; what is cut short or not msgpack ends the program */

typedef struct {
  const uint8_t *at, *end;
} unpacked;

static const uint8_t *take(unpacked *from, uint64_t len)
{
  if (len > (uint64_t)(from->end - from->at)) {
    fprintf(stderr, "the msgpack is cut short\n");
    exit(1);
  }
  const uint8_t *taken = from->at;
  from->at += len;
  return taken;
}

static uint64_t take_number(unpacked *from, unsigned bytes)
{
  uint64_t number = 0;
  for (const uint8_t *at = take(from, bytes); bytes > 0; bytes--) {
    number = number << 8 | *at++;
  }
  return number;
}

/* What a value is: its kind, and its number, its length in bytes (text, binary) or its entries (map, array). */
typedef enum { NIL, NUMBER, TEXT, ARRAY, MAP, OTHER } kind;

static kind head(unpacked *from, uint64_t *count)
{
  const uint8_t marker = *take(from, 1);
  *count = marker & 0x0f;
  if (marker <= 0x7f) return *count = marker, NUMBER;
  if (marker <= 0x8f) return MAP;
  if (marker <= 0x9f) return ARRAY;
  if (marker <= 0xbf) return *count = marker & 0x1f, TEXT;
  switch (marker) {
  case 0xc0: return NIL;
  case 0xc2: case 0xc3: return *count = marker & 1, NUMBER;
  case 0xc4: case 0xc5: case 0xc6: return *count = take_number(from, 1u << (marker - 0xc4)), TEXT;
  case 0xca: take(from, 4); return OTHER;
  case 0xcb: take(from, 8); return OTHER;
  case 0xcc: case 0xcd: case 0xce: case 0xcf: return *count = take_number(from, 1u << (marker - 0xcc)), NUMBER;
  case 0xd0: case 0xd1: case 0xd2: case 0xd3: take(from, 1u << (marker - 0xd0)); return OTHER;
  case 0xd9: case 0xda: case 0xdb: return *count = take_number(from, 1u << (marker - 0xd9)), TEXT;
  case 0xdc: case 0xdd: return *count = take_number(from, 2u << (marker - 0xdc)), ARRAY;
  case 0xde: case 0xdf: return *count = take_number(from, 2u << (marker - 0xde)), MAP;
  default:
    if (marker < 0xe0) {
      fprintf(stderr, "0x%02x is no msgpack that kvferry writes\n", marker);
      exit(1);
    }
    return OTHER;
  }
}

static void skip(unpacked *from)
{
  uint64_t count;
  const kind found = head(from, &count);
  if (found == TEXT) take(from, count);
  for (uint64_t i = 0; found == ARRAY && i < count; i++) skip(from);
  for (uint64_t i = 0; found == MAP && i < 2 * count; i++) skip(from);
}

static int is_text(unpacked from, const char *text)
{
  uint64_t len;
  return head(&from, &len) == TEXT && len == strlen(text) && memcmp(take(&from, len), text, len) == 0;
}

/* The value of `key` in the map that comes next; ends the program if there is none. */
static unpacked value_of(unpacked from, const char *key)
{
  uint64_t entries;
  if (head(&from, &entries) == MAP) {
    for (uint64_t i = 0; i < entries; i++) {
      const int found = is_text(from, key);
      skip(&from);
      if (found) return from;
      skip(&from);
    }
  }
  fprintf(stderr, "the map has no key %s\n", key);
  exit(1);
}

#endif
