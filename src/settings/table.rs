//! The table of keys.

use super::Component::{self, Agent, Aggregator, Connector, Listener, Scheduler, Worker};
use super::DefaultValue::{Absent, Empty, Flag as Is, Number, Required, Text as Name};
use super::SetBy::{Environment, Operator, OperatorWithoutVariable, Program};
use super::ValueKind::{Choice, Flag, Other, Path, Text, Ucx, Whole};
use super::{DefaultValue, SetBy, Setting, ValueKind};
use crate::proto::plan::GATHER_BELOW;

const DAY_MS: u64 = 24 * 3600 * 1000;
const DURATION: ValueKind = Whole(1, DAY_MS);
/// A bound that no memory reaches.
const BYTES: u64 = 1 << 48;
const SIZE: ValueKind = Whole(1, 65_536);

const fn row(
    giver: SetBy,
    key: &'static str,
    parts: &'static [Component],
    kind: ValueKind,
    unit: &'static str,
    default: DefaultValue,
    help: &'static str,
) -> Setting {
    Setting { key, parts, giver, kind, unit, default, help, read_late: false, is_retired: false, former: None }
}

const fn late(setting: Setting) -> Setting {
    Setting { read_late: true, ..setting }
}

const fn retired(setting: Setting) -> Setting {
    Setting { is_retired: true, ..setting }
}

/// A key that was called `former`.
const fn renamed(former: &'static str, setting: Setting) -> Setting {
    Setting { former: Some(former), ..setting }
}

/// Every key, in the order in which people are shown them.
#[rustfmt::skip]
pub const TABLE: &[Setting] = &[
    row(Operator, "host", &[Scheduler, Listener], Text, "", Absent("an address of this host that others reach is found"),
        "Address or name of this host that other engines are told; `0.0.0.0` and `::` stand for the found one. A loopback \
         address also confines the handshake listener to itself."),
    row(Operator, "port", &[Scheduler], Whole(0, 65_535), "", Number(5680),
        "TCP port of the handshake listener; the data-parallel index is added, 0 takes a free one. The default is next \
         to none of the ports of vLLM's own connectors (5600 and up by data-parallel index, 14579)."),
    row(Operator, "port", &[Listener], Whole(0, 65_535), "", Number(0), "As a scheduler's, for a listener alone."),
    row(Operator, "bind", &[Scheduler, Listener], Text, "", Absent("all addresses of this host"),
        "The one address or name of this host that the handshake listener binds, so that other engines can reach it by no \
         other. `0.0.0.0` binds all IPv4 addresses; where `bind` is given, `host` may be an address that is forwarded here."),
    row(Operator, "advertise_local", &[Scheduler, Listener], Flag, "", Is(false),
        "Allow a name such as `localhost` as `host`, so that other engines are told a loopback address. A loopback \
         address that is spelled out needs no permission."),
    row(Operator, "lease_ms", &[Scheduler], Whole(1000, DAY_MS), "ms", Number(30_000),
        "How long a finished prefill's blocks are kept without a sign of life from the decode engine."),
    row(Operator, "multi_turn", &[Scheduler], Flag, "", Is(false),
        "Let conversations go on: a decode engine keeps what it has of one, and the prefill engine of the next turn loads that."),
    row(Operator, "history_lease_ms", &[Scheduler], Whole(1000, DAY_MS), "ms", Number(480_000),
        "How long a decode engine keeps a conversation for its next turn."),
    row(Operator, "history_least_tokens", &[Scheduler], Whole(0, 1 << 32), "tokens", Number(64),
        "A prefill engine that misses fewer tokens of the turn before computes them itself."),
    row(Operator, "history_percent", &[Scheduler], Whole(0, 100), "percent", Number(50),
        "The most of a decode engine's cache that is kept for next turns. The oldest conversations give way."),
    row(Operator, "push_dialect", &[Connector], Flag, "", Is(false),
        "Let a prefill engine answer as one with vLLM's `NixlPushConnector`, with `transfer_mode` `push`, so that routers \
         send requests to both engines at once."),
    row(Operator, "bootstrap_port", &[Connector], Whole(1, 65_535), "", Absent("no such server"),
        "TCP port of an HTTP server in a prefill engine that answers `GET /query` as the bootstrap server of vLLM's \
         `MooncakeConnector` does, for proxies that speak its dialect; 8998 is where they look."),
    late(row(Operator, "key_file", &[Agent, Worker, Scheduler, Listener], Path, "", Absent("no key"),
        "File of the key that all engines share (`kvferry key PATH` makes one). Handshakes and messages are then sealed, \
         and engines without the key refused. An empty text means no key, whatever the environment says.")),
    row(Operator, "allowed_hosts", &[Scheduler], Text, "", Absent("any host"),
        "Names, addresses and networks (`10.1.0.0/16`) of the engines that this one may read from, with commas between them. A \
         request whose `kv_transfer_params` name another host is refused before anything is sent there. A name counts as it is \
         written, whatever its address."),
    row(Operator, "transport", &[Agent, Worker], Choice(&["auto", "tcp", "shm"]), "", Name("auto"),
        "What UCX may use: its own choice, TCP only, or copies between processes of one host, with messages over TCP. `tcp` \
         and `shm` take the place of `UCX_TLS`."),
    row(OperatorWithoutVariable, "ucx", &[Agent, Worker], Ucx, "", Empty,
        "UCX settings by name without the `UCX_` prefix, such as `{\"NET_DEVICES\": \"mlx5_0:1\"}`. They win over UCX's own \
         variables, `UCX_<NAME>`, which count for what is not given here. Where nobody gives `NET_DEVICES`, interfaces that \
         software for containers makes (`docker0`, `br-*`, ...) are left out. `TLS` is refused beside a `transport` that is not \
         `auto`. `RNDV_THRESH`, `ADDRESS_VERSION`, `TCP_RX_SEG_SIZE`, `TCP_PUT_ENABLE`, `TCP_CONN_NB`, `RCACHE_ENABLE`, `PROTO_EMULATION_ENABLE`, `RMA_PPLN_ENABLE` and, with `PROTO_ENABLE` off, \
         `TCP_TX_SEG_SIZE` always have kvferry's values, on which peers or owners of memory rely."),
    late(row(Operator, "ucx_lib", &[Agent, Worker], Text, "", Absent("found: loaded already, kvferry-ucx, the system's, libucx"),
        "Path of the libucp.so.0 to open.")),
    row(Operator, "window", &[Agent, Worker], Whole(1, 1024), "operations", Number(64),
        "UCX operations in flight to one peer."),
    row(Operator, "window_bytes", &[Agent], Whole(1, BYTES), "bytes", Number(16 << 20), "Bytes in flight to one peer."),
    row(Operator, "max_operation_bytes", &[Agent], Whole(1, BYTES), "bytes", Number(4 << 20),
        "Adjacent blocks are merged into operations of at most so many bytes."),
    row(Operator, "gather_below", &[Agent], Whole(0, BYTES), "bytes", Number(GATHER_BELOW),
        "Transfers between host memories whose runs are shorter than this on average travel in messages of many runs; 0 \
         means never."),
    row(Operator, "connect_timeout_ms", &[Agent], DURATION, "ms", Number(10_000),
        "How long a peer may take to answer the hello. A worker's is `handshake_timeout_ms`."),
    row(Operator, "cancel_grace_ms", &[Agent], DURATION, "ms", Number(5_000),
        "How long a cancelled transfer's operations, and what peers read and write of memory that is deregistered, may take to end \
         before the connection is closed; at the agent's end also messages that were sent before."),
    row(Operator, "deregister_timeout_ms", &[Agent], DURATION, "ms", Number(30_000),
        "How long deregistering waits for the transfers that use the memory."),
    row(Operator, "spin_us", &[Agent], Whole(0, 1_000_000), "us", Number(300),
        "How long the progress thread spins without progress before it sleeps, while transfers are in flight; not where bytes come \
         slowly (less than 256 MiB a second)."),
    row(Operator, "copy_threads", &[Agent, Worker], Whole(1, 64), "threads", Number(2),
        "Threads that copy memory of other processes of this host, the progress thread among them; at most one per processor. \
         Memory whose pages may have to come from elsewhere (a mapped file) gets one beside the progress thread in any case."),
    retired(row(Operator, "streams", &[Agent, Worker], Flag, "", Absent("none"),
        "Has no effect. It is accepted, with a warning, for the sake of older configurations.")),
    row(Operator, "send_queue_bytes", &[Agent], Whole(0, BYTES), "bytes", Number(64 << 20),
        "Unsent messages to one peer before more are refused."),
    row(Operator, "handshake_timeout_ms", &[Worker], DURATION, "ms", Number(30_000),
        "Longest time until a producer's ranks are known and connected, retries included."),
    row(Operator, "transfer_timeout_ms", &[Worker], DURATION, "ms", Number(120_000),
        "Longest time for one request's reads."),
    row(Operator, "verdict_timeout_ms", &[Worker], DURATION, "ms", Number(10_000),
        "Longest wait for the producer's word that the lease held."),
    row(Operator, "heartbeat_divisor", &[Worker], Whole(2, 1000), "", Number(6),
        "Heartbeats per lease, at least 100 ms apart."),
    row(Operator, "hold_timeout_ms", &[Worker], DURATION, "ms", Number(3_600_000),
        "How long a lease is kept alive for a request that is neither loaded nor released, and how long a load awaits the end of a \
         prefill that is under way."),
    row(Operator, "await_timeout_ms", &[Worker], DURATION, "ms", Number(600_000),
        "How long a request that both engines were asked for at once awaits a prefill of which the prefill engine has said nothing. \
         It says nothing of a prefill before its end where that waits in its queue, is shorter than `chunk_tokens`, or goes through \
         a host buffer. With `chunk_tokens` 0, `hold_timeout_ms` is the limit."),
    renamed("portion_tokens", row(Operator, "chunk_tokens", &[Worker], Whole(0, 1 << 20), "tokens", Number(256),
        "The decode engine reads a chunk of the cache whenever the prefill engine has written so many more tokens, for prompts that \
         both engines were asked for at once. Prompts with fewer tokens to load are read whole. 0: nothing is read before the end \
         of the prefill.")),
    row(Operator, "peer_ttl_ms", &[Worker], DURATION, "ms", Number(600_000),
        "A peer that no request has used for so long is disconnected."),
    row(Operator, "early_message_ms", &[Worker], DURATION, "ms", Number(30_000),
        "How long a message about a request that is not granted yet is kept."),
    row(Operator, "tombstone_ms", &[Worker], DURATION, "ms", Number(120_000), "How long an ended request is remembered."),
    row(Operator, "verify", &[Agent, Worker], Flag, "", Is(false),
        "Check each read against a digest that the producer makes of its own bytes; both sides read all of them once \
         more."),
    row(Operator, "request_log", &[Worker], Path, "", Absent("no trace"),
        "Taken for `trace`, with a warning, where that is not given. If no new file can be made there, nothing is traced."),
    row(Operator, "device_copies", &[Agent, Worker], Flag, "", Is(true),
        "On the side that starts a transfer: map device memory of a peer on the same host and have the device copy it, many blocks \
         at a time. Else UCX moves it, block by block; memory of several allocations, and what UCX refuses, goes by messages."),
    renamed("rehearse", row(Operator, "warm_up", &[Agent, Worker], Flag, "", Is(true),
        "Connect to a worker of the own process at the start, so that the first connection to a peer of this host does not wait \
         for UCX to choose its protocols.")),
    row(Operator, "telemetry", &[Agent, Worker], Flag, "", Is(true),
        "Whether anything is counted, for vLLM's log line and metrics and for the stats of hosts."),
    row(Operator, "metrics_file", &[Agent], Path, "", Absent("no file"),
        "File that an agent writes every 5 seconds with its figures and those of each peer, in Prometheus' text format; `%p` \
         stands for the process id, `%a` for the agent's name."),
    late(row(Operator, "trace", &[Worker], Path, "", Absent("no trace"),
        "File to be made for a trace of the lives of requests, for `kvferry trace`; `%p` stands for the process id, and a \
         name that is taken gets a number.")),
    row(Program, "engine_id", &[Worker, Scheduler, Listener], Other("text, 1 to 256 bytes"), "", Required,
        "The engine; the same on its scheduler and all of its workers."),
    row(Program, "pp_rank", &[Worker], Whole(0, 65_535), "", Number(0), "Pipeline-parallel rank."),
    row(Program, "tp_rank", &[Worker], Whole(0, 65_535), "", Number(0), "Tensor-parallel rank."),
    row(Program, "tp_size", &[Worker, Scheduler, Listener], SIZE, "ranks", Number(1),
        "Tensor-parallel size. An engine has at most 4096 ranks, `tp_size` times `pp_size`."),
    row(Program, "pp_size", &[Worker, Scheduler, Listener], SIZE, "ranks", Number(1),
        "Pipeline-parallel size. An engine has at most 4096 ranks, `tp_size` times `pp_size`."),
    row(Program, "dcp_size", &[Worker, Scheduler, Listener], SIZE, "ranks", Number(1), "Decode-context-parallel size."),
    row(Program, "compat", &[Worker], Other("list of [name, value] or [name, value, true]"), "", Empty,
        "Facts that both engines must share: model, dtype and so on, as texts. With a third entry, true, a fact that other \
         fields stand for: a difference is logged where both sides say so."),
    row(Program, "name", &[Agent, Worker], Text, "", Absent("`agent`, or made of engine and rank"),
        "Name in logs and in what peers see; at most 256 bytes."),
    row(Program, "groups", &[Scheduler], Other("list of maps"), "", Required,
        "The KV-cache groups in the engine's order, as in the geometry of any rank."),
    row(Program, "null_block", &[Scheduler], Other("block id or nil"), "", Number(0),
        "The id that stands for no block in block lists; nil where there is none."),
    row(Program, "reuses_blocks", &[Scheduler], Flag, "", Is(true),
        "Whether the engine reuses a request's blocks for other requests with the same prefix."),
    row(Program, "written_late", &[Scheduler], Flag, "", Is(false),
        "Whether a finished prefill's answer may leave before all of its blocks are written. A decode engine then loads when \
         all workers of this one have confirmed them."),
    row(Program, "num_blocks", &[Scheduler], Whole(0, 1 << 32), "blocks", Number(0),
        "The blocks of the engine's cache, of which `history_percent` is taken. With 0 it keeps none for next turns."),
    row(Program, "data_parallel_index", &[Scheduler, Listener], Whole(0, 65_535), "", Number(0),
        "Added to a `port` that is not 0, so that data-parallel engines of one host differ."),
    row(Program, "push", &[Scheduler, Listener], Flag, "", Is(false),
        "Whether workers may push their metadata to the listener, in place of the program's own RPC."),
    row(Program, "ranks", &[Aggregator], Other("list of maps of pp and tp"), "", Required,
        "Every rank whose report is needed."),
    row(Program, "limit", &[Aggregator], Whole(1, 1 << 32), "requests", Absent("the library's bound"),
        "Requests under way that are remembered, and as many ended ones, of these 4096 at most."),

    late(row(Environment, "log", &[], Choice(&["off", "error", "warn", "info", "debug", "trace"]), "", Name("warn"),
        "Level of the library's lines on standard error. Under vLLM, and wherever `kvferry.log` is used, Python's logging \
         decides instead.")),
    late(row(Environment, "library", &[], Text, "", Absent("the one in the Python package"),
        "Path of the libkvferry.so that the Python package and the NIXL plug-in load.")),
    late(row(Environment, "nixl_version", &[], Text, "", Absent("that of the wheel"),
        "For the NIXL plug-in: the version of a NIXL that was built from source, or of a wheel that the plug-in is to \
         accept without comparing its interface.")),
];

/// Variables for building and testing, which no engine reads. Those that end with `_` are prefixes.
#[rustfmt::skip]
pub const DEVELOPMENT: &[(&str, &str)] = &[
    ("KVFERRY_PYTHON", "The Python that `scripts/setup` makes environments from, and that a build asks for libclang and \
      UCX's headers."),
    ("KVFERRY_UCX_INCLUDE", "Folder of UCX's headers for a build."),
    ("KVFERRY_CXX", "`zig` makes `scripts/setup` install a C++ compiler from PyPI also where there is one."),
    ("KVFERRY_REQUIRE", "What tests must not skip for want of, separated by commas: `cuda`, `netns`, \
      `history` (the commits of which `scripts/build-previous` builds the previous protocol version), \
      `rdma` (the tests over RDMA, which `scripts/test` runs in a virtual machine), `nixl` (every version of NIXL that \
      `scripts/setup nixl` installs, and g++, which compiles the plug-in), `mooncake` (Mooncake's transfer engine), \
      `ray` (Ray Serve LLM, which `scripts/setup ray-serve` installs), a program such as `pkg-config`, or what a skipped test of `kvferry doctor` says that it needs."),
    ("KVFERRY_BLESS", "Set: tests write generated files (header, wire goldens, tables of documents) in place of comparing."),
    ("KVFERRY_NIXL", "A folder with NIXL's Python package, for the benchmark of `gpu-check`, in place of the one that its folder carries."),
    ("KVFERRY_CUDA_DOUBLE_", "Settings of the double of the CUDA driver: `tests/cuda_double/README.md`."),
    ("KVFERRY_FUZZ_CASES", "Runs per fuzz target in `cargo test --test tree fuzz_cases`."),
    ("KVFERRY_SHAPE", "`cargo test --test connector shapes` runs the pairs of shapes whose names contain it."),
    ("KVFERRY_SHAPES_SEED", "Seed of the random pairs in `cargo test -p kvferry-proto --test proto_shapes`."),
    ("KVFERRY_SHAPES_CASES", "Number of random pairs there."),
    ("KVFERRY_AM_LIMIT", "The built `am_limit` program, for `scripts/bench`."),
    ("KVFERRY_AM_LIMIT_SENDER", "Set by that program for its own second process."),
    ("KVFERRY_CHAOS_", "Set by `scripts/chaos` for its engines."),
    ("KVFERRY_DEMO_", "Set by `scripts/demo` for its servers."),
    ("KVFERRY_TEST_", "Set by tests for their own processes; `KVFERRY_TEST_LOG` shows the library's log."),
];
