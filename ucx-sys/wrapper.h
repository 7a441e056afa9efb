/* What ucx-sys binds: the public UCP interface and nothing of UCT. */
#include <ucp/api/ucp.h>
