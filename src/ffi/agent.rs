//! `kvf_agent_*`: the transfer engine.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;

use super::boundary::{Out, slice, slice_mut};
use super::buffer::{fill, kvf_buffer};
use super::handle::{self, Object};
use super::{decode, log};
use crate::agent::{Agent, AgentConfig, Event, PeerId, PeerStats, RegionId, Route};
use crate::agent::{decode_metadata, decode_region, encode_metadata, encode_region};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::proto::wire::MemoryKind;
use crate::settings::{Component, parse_config};

/// A transfer engine. Opaque.
pub struct kvf_agent {
    _opaque: (),
}

/// Where registered bytes live.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvf_memory_kind {
    /// Ordinary process memory.
    KVF_MEMORY_HOST = 0,
    /// Memory of a CUDA device.
    KVF_MEMORY_CUDA = 1,
}

/// The kind of a kvf_event.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvf_event_kind {
    /// A transfer is over, and touches no memory any more. Each transfer gets exactly one. `status` is KVF_OK when every
    /// byte was moved; otherwise the payload is the error's text.
    KVF_EVENT_TRANSFER_DONE = 1,
    /// A message arrived; the payload is its bytes.
    KVF_EVENT_MESSAGE = 2,
    /// The peer said hello; the payload is its name. Also comes, with a new peer id, on the side that was connected to.
    KVF_EVENT_PEER_CONNECTED = 3,
    /// The peer is gone and its id dead; `status` and the payload, a text, say why.
    KVF_EVENT_PEER_LOST = 4,
}

/// Something that happened. Fields that a kind does not use are 0.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct kvf_event {
    /// A kvf_event_kind. A program ignores the kinds that it does not know.
    pub kind: u32,
    /// A kvf_code.
    pub status: i32,
    /// The peer.
    pub peer: u64,
    /// The transfer.
    pub transfer: u64,
    /// The caller's number for the transfer.
    pub user_data: u64,
    /// Bytes whose operations succeeded.
    pub bytes: u64,
    /// UCX operations posted.
    pub operations: u64,
    /// From the first posted operation to the last ended one, in microseconds.
    pub duration_us: u64,
    /// The peer's incarnation.
    pub incarnation: u64,
    /// Names the event's bytes for kvf_agent_recv; 0 when it has none.
    pub payload: u64,
    /// How many bytes.
    pub payload_len: u64,
}

/// The object behind a handle.
pub(super) struct AgentObject {
    pub(super) agent: Agent,
    /// The bytes of the events handed out last.
    payloads: Mutex<Payloads>,
}

#[derive(Default)]
struct Payloads {
    last: u64,
    bytes: HashMap<u64, Vec<u8>>,
}

impl Object for AgentObject {
    type C = kvf_agent;
    const NOUN: &'static str = "agent";
}

/// Decodes the kind of memory that C callers pass.
pub(super) fn memory_kind(kind: u32, device: u32) -> Result<MemoryKind> {
    if kind == kvf_memory_kind::KVF_MEMORY_HOST as u32 {
        Ok(MemoryKind::Host)
    } else if kind == kvf_memory_kind::KVF_MEMORY_CUDA as u32 {
        Ok(MemoryKind::Cuda { device })
    } else {
        Err(Error::invalid(format!("memory kind {kind} is unknown; expected KVF_MEMORY_HOST or KVF_MEMORY_CUDA")))
    }
}

/// Starts an agent: opens UCX and starts the thread that owns it.
///
/// `config` is a msgpack map, or NULL with length 0 for the defaults, with the keys for an agent that
/// kvf_settings_describe tells and docs/configuration.md lists.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_start(config: *const u8, config_len: usize, out: *mut *mut kvf_agent) -> i32 {
    boundary!(kvf_agent_start, {
        // SAFETY: the caller's promise for out-parameters.
        let out = unsafe { Out::new(out, "out")? };
        // SAFETY: the caller's promise for arrays.
        let config = unsafe { slice(config, config_len, "config")? };
        log::start();
        let config: AgentConfig = parse_config(Component::Agent, config)?;
        let agent = Agent::start(config)?;
        out.write(handle::give(AgentObject { agent, payloads: Mutex::default() }));
        Ok(())
    })
}

/// Registers `len` bytes at `addr`. Transfers can then name them, and peers can read and write them. `kind` is a
/// kvf_memory_kind, `device` the ordinal of the CUDA device (0 for host memory). `*region` names the registration,
/// `*index` is what segments on both sides call it. Ranges may overlap: each is a region of its own. Waits for the
/// registration, which pins the memory.
///
/// The memory must stay allocated until kvf_agent_deregister, kvf_agent_shutdown or kvf_agent_free has returned KVF_OK.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_register(
    agent: *mut kvf_agent,
    addr: *mut c_void,
    len: u64,
    kind: u32,
    device: u32,
    region: *mut u64,
    index: *mut u32,
) -> i32 {
    boundary!(kvf_agent_register, {
        // SAFETY: the caller's promise for out-parameters.
        let (region, index) = unsafe { (Out::new(region, "region")?, Out::new(index, "index")?) };
        let object = handle::get::<AgentObject>(agent)?;
        // SAFETY: the caller promises that the memory stays allocated until it is taken back.
        let range = unsafe { MemoryRange::new(addr.addr() as u64, len, memory_kind(kind, device)?)? };
        let id = object.agent.register(range)?;
        region.write(id.raw());
        index.write(id.index());
        Ok(())
    })
}

/// Deregisters a region; when this returns KVF_OK nothing touches its memory. New transfers with it are refused,
/// those that use it are cancelled, and peers on this host that copy by themselves are waited for, also those that
/// leave. A peer whose process stands still is not waited for longer than cancel_grace_ms, and may end a copy that it
/// has begun when it goes on; one that this side has disconnected is not asked: deregister first. KVF_TIMEOUT when
/// transfers, or copies that peers make, have not ended in time: then the memory must stay allocated, and a later
/// call waits again.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_deregister(agent: *mut kvf_agent, region: u64) -> i32 {
    boundary!(kvf_agent_deregister, { handle::get::<AgentObject>(agent)?.agent.deregister(RegionId::from_raw(region)) })
}

/// Gives the metadata with which another agent connects to this one. It reaches the regions registered so far.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_metadata(agent: *mut kvf_agent, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_agent_metadata, {
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || encode_metadata(&handle::get::<AgentObject>(agent)?.agent.metadata()?)) }
    })
}

/// Gives the metadata of one region, for peers that have connected already. Its size does not depend on other
/// regions. The peer passes it to kvf_agent_add_region.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_region_metadata(agent: *mut kvf_agent, region: u64, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_agent_region_metadata, {
        let region = RegionId::from_raw(region);
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || encode_region(&handle::get::<AgentObject>(agent)?.agent.region_metadata(region)?)) }
    })
}

/// Makes a peer's region known that was registered after its metadata was made. The metadata is that of
/// kvf_agent_connect. `metadata` is of the peer's kvf_agent_region_metadata; `*index` becomes what segments call the
/// region. Passing the same again does nothing; other metadata of a region that is known is KVF_CORRUPT, because an
/// index names one region for ever. Metadata of another life of the peer is KVF_PEER_DIED. A later kvf_agent_connect
/// with metadata that lists regions but not this one takes it away again; metadata that lists no region takes none
/// away.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_add_region(
    agent: *mut kvf_agent,
    peer: u64,
    metadata: *const u8,
    metadata_len: usize,
    index: *mut u32,
) -> i32 {
    boundary!(kvf_agent_add_region, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        let (index, metadata) = unsafe { (Out::new(index, "index")?, slice(metadata, metadata_len, "metadata")?) };
        let object = handle::get::<AgentObject>(agent)?;
        index.write(object.agent.add_region(PeerId::from_raw(peer), decode_region(metadata)?)?);
        Ok(())
    })
}

/// Forgets a region of a peer's, by its index. New transfers with it end with KVF_NOT_FOUND; those that have begun go
/// on, and what this side holds of the region (its key, a mapping) is released when the last of them has ended.
/// kvf_agent_add_region makes it known again. A region that is not known is KVF_NOT_FOUND.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_remove_region(agent: *mut kvf_agent, peer: u64, region: u32) -> i32 {
    boundary!(kvf_agent_remove_region, {
        handle::get::<AgentObject>(agent)?.agent.remove_region(PeerId::from_raw(peer), region)
    })
}

/// Connects to the agent that made `metadata`. Returns before the peer has answered: transfers and messages may be
/// started at once; KVF_EVENT_PEER_CONNECTED or KVF_EVENT_PEER_LOST follows.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_connect(
    agent: *mut kvf_agent,
    metadata: *const u8,
    metadata_len: usize,
    peer: *mut u64,
) -> i32 {
    boundary!(kvf_agent_connect, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        let (peer, metadata) = unsafe { (Out::new(peer, "peer")?, slice(metadata, metadata_len, "metadata")?) };
        let object = handle::get::<AgentObject>(agent)?;
        peer.write(object.agent.connect(&decode_metadata(metadata)?)?.raw());
        Ok(())
    })
}

/// Ends a connection; its id is invalid at once. Its transfers are cancelled, and messages not sent yet are lost.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_disconnect(agent: *mut kvf_agent, peer: u64) -> i32 {
    boundary!(kvf_agent_disconnect, { handle::get::<AgentObject>(agent)?.agent.disconnect(PeerId::from_raw(peer)) })
}

#[derive(Serialize)]
struct RouteMap {
    connected: bool,
    lanes: String,
    host: &'static str,
    device: &'static str,
    mixed: &'static str,
}

/// Tells over which transports and data paths bytes go between this agent and a peer. `*out` is a msgpack map with
/// connected (bool: whether the peer has answered; what follows is empty before), lanes (transports and devices of
/// the connection, in UCX's words), and the names of the paths of long runs: host (between host memories), device
/// (between CUDA devices) and mixed (between the two).
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_route(agent: *mut kvf_agent, peer: u64, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_agent_route, {
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || route(&handle::get::<AgentObject>(agent)?.agent, PeerId::from_raw(peer))) }
    })
}

fn route(agent: &Agent, peer: PeerId) -> Result<Vec<u8>> {
    let route = match agent.route(peer)? {
        Some(Route { lanes, host, device, mixed }) => RouteMap { connected: true, lanes, host, device, mixed },
        None => RouteMap { connected: false, lanes: String::new(), host: "", device: "", mixed: "" },
    };
    decode::encode("a route", &route)
}

#[derive(Serialize)]
struct PeersMap {
    peers: Vec<PeerStats>,
}

/// Gives the figures of each peer since the start: a msgpack map whose peers is a list of
/// maps with name, connected (1 or 0), lanes, host, device and mixed (as of kvf_agent_route, empty while not connected), and
/// the counters that kvf_stats_metrics has under the scope "peer". Connections to agents of one name count together, also
/// those that are over; of names without a connection, the 256 that were connected last are kept. Transfers count on the
/// side that started them.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_peers(agent: *mut kvf_agent, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_agent_peers, {
        let told = |agent: &Agent| decode::encode("the peers", &PeersMap { peers: agent.peer_stats()? });
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || told(&handle::get::<AgentObject>(agent)?.agent)) }
    })
}

/// Sends a message of at most 16 MiB, copied before this returns. It arrives once and in order, unless the connection
/// breaks. KVF_EXHAUSTED while too many bytes to this peer are not sent yet.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_send(agent: *mut kvf_agent, peer: u64, data: *const u8, data_len: usize) -> i32 {
    boundary!(kvf_agent_send, {
        // SAFETY: the caller's promise for arrays.
        let data = unsafe { slice(data, data_len, "data")? };
        handle::get::<AgentObject>(agent)?.agent.send(PeerId::from_raw(peer), data.to_vec())
    })
}

/// Takes up to `cap` of the oldest events, without waiting. `*count` becomes their number, which may be 0. The
/// payloads of the events taken before are dropped: fetch what you need with kvf_agent_recv first. One thread at a
/// time polls or waits. While a thread polls without a pause for something small, it drives the agent in place of the
/// library's thread.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_poll(
    agent: *mut kvf_agent,
    out: *mut kvf_event,
    cap: usize,
    count: *mut usize,
) -> i32 {
    // SAFETY: the caller's promise for this call.
    boundary!(kvf_agent_poll, { unsafe { take_events(agent, None, out, cap, count) } })
}

/// Like kvf_agent_poll, but waits up to `timeout_ms` milliseconds for the first event. KVF_SHUT_DOWN when the agent has
/// ended and every event was taken.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_wait(
    agent: *mut kvf_agent,
    timeout_ms: u32,
    out: *mut kvf_event,
    cap: usize,
    count: *mut usize,
) -> i32 {
    let timeout = Duration::from_millis(timeout_ms.into());
    // SAFETY: the caller's promise for this call.
    boundary!(kvf_agent_wait, { unsafe { take_events(agent, Some(timeout), out, cap, count) } })
}

/// # Safety
/// `out` must be valid for writes of `cap` events, and `count` for a write.
unsafe fn take_events(
    agent: *mut kvf_agent,
    timeout: Option<Duration>,
    out: *mut kvf_event,
    cap: usize,
    count: *mut usize,
) -> Result<()> {
    // SAFETY: this function's contract.
    let count = unsafe { Out::new(count, "count")? };
    // SAFETY: as above. An array that was not initialized is not read: `kvf_event` is plain numbers, and it is only
    // written through `MaybeUninit`.
    let out = unsafe { slice_mut(out.cast::<std::mem::MaybeUninit<kvf_event>>(), cap, "out")? };
    let object = handle::get::<AgentObject>(agent)?;
    if out.is_empty() {
        return Err(Error::invalid("cap is 0; expected room for at least one event"));
    }
    let mut first = timeout.and_then(|timeout| object.agent.wait_event(timeout));
    let mut payloads = object.payloads.lock().unwrap_or_else(PoisonError::into_inner);
    payloads.bytes.clear();
    let mut taken = 0usize;
    for place in out.iter_mut() {
        let next =
            if taken == 0 { first.take().or_else(|| object.agent.poll_event()) } else { object.agent.next_event() };
        let Some(event) = next else { break };
        place.write(payloads.describe(event));
        taken = taken.saturating_add(1);
    }
    if taken == 0 && timeout.is_some() && object.agent.is_drained() {
        return Err(Error::new(ErrorKind::ShutDown, "the agent is shut down and every event was taken; stop waiting"));
    }
    count.write(taken);
    Ok(())
}

impl Payloads {
    fn describe(&mut self, event: Event) -> kvf_event {
        let mut described = kvf_event::default();
        let payload = match event {
            Event::TransferDone { id, user_data, peer, result, bytes, operations, posted_at, finished_at, .. } => {
                described.kind = kvf_event_kind::KVF_EVENT_TRANSFER_DONE as u32;
                described.transfer = id.raw();
                described.user_data = user_data;
                described.peer = peer.raw();
                described.bytes = bytes;
                described.operations = operations;
                let duration = finished_at.saturating_duration_since(posted_at);
                described.duration_us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
                match result {
                    Ok(()) => Vec::new(),
                    Err(error) => {
                        described.status = error.kind().code();
                        error.message().as_bytes().to_vec()
                    }
                }
            }
            Event::Message { peer, data } => {
                described.kind = kvf_event_kind::KVF_EVENT_MESSAGE as u32;
                described.peer = peer.raw();
                data
            }
            Event::PeerConnected { peer, name, incarnation, .. } => {
                described.kind = kvf_event_kind::KVF_EVENT_PEER_CONNECTED as u32;
                described.peer = peer.raw();
                described.incarnation = incarnation.0;
                name.into_bytes()
            }
            Event::PeerLost { peer, error } => {
                described.kind = kvf_event_kind::KVF_EVENT_PEER_LOST as u32;
                described.peer = peer.raw();
                described.status = error.kind().code();
                error.message().as_bytes().to_vec()
            }
        };
        if !payload.is_empty() {
            self.last = self.last.wrapping_add(1);
            described.payload = self.last;
            described.payload_len = payload.len() as u64;
            self.bytes.insert(self.last, payload);
        }
        described
    }
}

/// Fetches an event's payload, once. KVF_NOT_FOUND after it was fetched, and after the next poll or wait.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_recv(agent: *mut kvf_agent, payload: u64, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_agent_recv, {
        // SAFETY: the caller's promise for out-parameters.
        unsafe {
            fill(out, || {
                let object = handle::get::<AgentObject>(agent)?;
                let mut payloads = object.payloads.lock().unwrap_or_else(PoisonError::into_inner);
                payloads.bytes.remove(&payload).ok_or_else(|| {
                    Error::not_found(format!(
                        "payload {payload} is not waiting: it was fetched already, or events were taken since"
                    ))
                })
            })
        }
    })
}

/// Gives gauges, counters and histograms since the start, as a msgpack map. kvf_stats_metrics tells what each is.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_stats(agent: *mut kvf_agent, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_agent_stats, {
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || decode::encode("the agent's stats", &handle::get::<AgentObject>(agent)?.agent.stats()?)) }
    })
}

/// Cancels every transfer, closes every connection and frees UCX, waiting at most `timeout_ms` milliseconds. After
/// KVF_OK no memory is touched any more; the events of ended transfers can still be taken, and everything else gives
/// KVF_SHUT_DOWN. A later call does nothing and returns what the first one did. After KVF_TIMEOUT registered memory must stay
/// allocated for ever: an operation has not ended, or a peer on this host that copies by itself has not answered.
///
/// Messages sent before leave first, for which a peer that has not answered yet is waited for, within cancel_grace_ms and half of
/// `timeout_ms`. How many could not be delivered to a peer is said on the log.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_shutdown(agent: *mut kvf_agent, timeout_ms: u32) -> i32 {
    boundary!(kvf_agent_shutdown, {
        handle::get::<AgentObject>(agent)?.agent.shutdown(Duration::from_millis(timeout_ms.into()))
    })
}

/// Frees the agent, after a shutdown of at most 10 seconds if there was none. It returns the shutdown's status, whichever call
/// made it: unless that is KVF_OK, registered memory must stay allocated for ever. The handle is dead in any case.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_free(agent: *mut kvf_agent) -> i32 {
    boundary!(kvf_agent_free, { handle::take::<AgentObject>(agent)?.agent.shutdown(super::FREE_TIMEOUT) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;
    use crate::agent::Stuck;
    use crate::error::ErrorKind;

    #[test]
    fn an_agent_that_ended_too_late_is_freed_with_the_same_status() {
        let config = AgentConfig { warm_up: false, ..AgentConfig::default() };
        let (go, may_go) = sync_channel(0);
        let agent = Agent::start_with(config, Box::new(|_| Box::new(Stuck(may_go)))).unwrap();
        let agent = handle::give(AgentObject { agent, payloads: Mutex::default() });
        // SAFETY: these functions look the handle up.
        let [first, second, freed] =
            unsafe { [kvf_agent_shutdown(agent, 0), kvf_agent_shutdown(agent, 1000), kvf_agent_free(agent)] };
        assert_eq!([first, second, freed], [ErrorKind::Timeout.code(); 3]);
        drop(go);
    }
}
