//! The parts of a worker, its endpoints and their rkeys that UCX uses. They hold each other, and the operations under way hold
//! them, so that each lives as long as UCX may use it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::RawFd;
use std::os::raw::c_void;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ucx_sys::{Ucp, ucp_ep_h, ucp_rkey_h, ucp_worker_h, ucs_status_t};

use super::am::{MessageSlot, Messages};
use super::context::Context;
use super::memory;
use super::memory_kind::MemoryKind;
use super::queue::{Queue, change};
use super::request::{Completion, OperationSet, Posted, Purpose};
use super::status::{Status, UcxError};

/// How long endpoints that are being closed without force get to say goodbye when the worker is closed and nothing else is
/// under way: that may never end when the peer is gone.
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);

/// The parts of a worker that an operation holds, besides memory and buffers.
pub(super) struct OperationOwner {
    pub(super) endpoint: Rc<EndpointCore>,
    #[expect(dead_code, reason = "held and never looked at")]
    pub(super) rkey: Option<Rc<Rkey>>,
}

/// The part of a worker that lives until its last endpoint, rkey and operation is gone.
pub(super) struct WorkerCore {
    pub(super) context: Arc<Context>,
    pub(super) handle: ucp_worker_h,
    pub(super) event_fd: RawFd,
    pub(super) max_header: usize,
    pub(super) operations: OperationSet<OperationOwner>,
    /// Those that UCX has not closed yet. They hold this core in turn; `Worker`'s drop ends that.
    pub(super) endpoints: Cell<BTreeMap<u64, Rc<EndpointCore>>>,
    pub(super) next_endpoint: Cell<u64>,
    pub(super) failures: Queue<(u64, Status)>,
    pub(super) completions: Queue<Completion>,
    pub(super) messages: Rc<Messages>,
    /// Raw because UCX has their addresses; freed when the worker is gone.
    pub(super) slots: Cell<Vec<(u16, *mut MessageSlot)>>,
}

impl WorkerCore {
    pub(super) fn api(&self) -> &'static Ucp {
        self.context.library().api()
    }

    pub(super) fn remember_endpoint(&self, id: u64, core: Rc<EndpointCore>) {
        change(&self.endpoints, |endpoints| endpoints.insert(id, core));
    }

    pub(super) fn forget_endpoint(&self, id: u64) {
        // Dropped only when the map is back in its place.
        drop(change(&self.endpoints, |endpoints| endpoints.remove(&id)));
    }

    fn endpoints(&self) -> Vec<Rc<EndpointCore>> {
        change(&self.endpoints, |endpoints| endpoints.values().cloned().collect())
    }

    pub(super) fn progress(&self) -> bool {
        // SAFETY: the worker is alive, no other thread has it (`Worker`), and no callback of UCX's calls this.
        let events = unsafe { self.api().ucp_worker_progress(self.handle) };
        let reaped = self.reap();
        events != 0 || reaped
    }

    /// Turns what UCX's callbacks noted into completions, messages and closed endpoints.
    fn reap(&self) -> bool {
        let mut any = false;
        while let Some((operation, request)) = self.operations.reap() {
            any = true;
            if !request.is_null() {
                // SAFETY: UCX returned the request and has called its callback; it is freed once.
                unsafe { self.api().ucp_request_free(request) };
            }
            let status = operation.status();
            match (operation.purpose, &operation.owner) {
                (Purpose::User { op, token }, Some(OperationOwner { endpoint, .. })) => {
                    endpoint.ended();
                    let result = status.check(op, || format!("{endpoint:?}"));
                    self.completions.push(Completion { token, endpoint: endpoint.id, result });
                }
                (Purpose::Close, Some(OperationOwner { endpoint, .. })) => endpoint.closed(),
                // Both are always posted with their endpoint.
                (Purpose::User { .. } | Purpose::Close, None) => {}
            }
            self.operations.recycle(operation);
        }
        any
    }

    pub(super) fn has_news(&self) -> bool {
        self.operations.has_done()
            || !self.messages.is_empty()
            || !self.completions.is_empty()
            || !self.failures.is_empty()
    }

    /// Closes all endpoints and waits until UCX has ended everything. False when the limit passed before.
    pub(super) fn drain(&self, limit: Duration) -> bool {
        for endpoint in self.endpoints() {
            endpoint.start_close(true);
        }
        let start = Instant::now();
        loop {
            let progressed = self.progress();
            if self.operations.live() == 0 && self.endpoints().is_empty() {
                break;
            }
            let passed = start.elapsed();
            if passed >= limit.min(GOODBYE_LIMIT) && self.operations.only_closes() {
                // No memory is at stake, and destroying the worker destroys its endpoints whatever their state.
                log::debug!("{} connections were not closed", self.operations.live());
                self.operations.abandon();
                drop(self.endpoints.take());
                break;
            }
            if passed >= limit {
                return false;
            }
            if !progressed {
                thread::sleep(Duration::from_micros(50));
            }
        }
        true
    }
}

impl Drop for WorkerCore {
    fn drop(&mut self) {
        // SAFETY: endpoints, rkeys and operations hold an Rc of this core, so none is left, and no other
        // thread has any, because they go from thread to thread together (`Worker`). The handle is not used again.
        unsafe { self.api().ucp_worker_destroy(self.handle) };
        for (_, slot) in self.slots.take() {
            // SAFETY: made by Box::into_raw; UCX, which had the address, no longer has the worker.
            drop(unsafe { Box::from_raw(slot) });
        }
    }
}

/// How far an endpoint is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EndpointState {
    Open,
    Closing,
    /// UCX has released it.
    Closed,
}

/// The part of an endpoint that lives until UCX and all operations are done with it. The worker holds one too, until UCX has
/// closed the endpoint, because UCX's error callback may come until then.
pub(super) struct EndpointCore {
    pub(super) worker: Rc<WorkerCore>,
    pub(super) id: u64,
    pub(super) name: String,
    /// Null before it is made and from the moment it is being closed.
    pub(super) handle: Cell<ucp_ep_h>,
    pub(super) state: Cell<EndpointState>,
    /// The status of UCX's error callback, OK as long as it has not run.
    pub(super) failed: Cell<Status>,
    pub(super) in_flight: Cell<usize>,
}

impl EndpointCore {
    pub(super) fn api(&self) -> &'static Ucp {
        self.worker.api()
    }

    /// UCX's handle while operations may be posted.
    pub(super) fn open_handle(&self, op: &'static str) -> Result<ucp_ep_h, UcxError> {
        if self.state.get() != EndpointState::Open {
            return Err(UcxError::new(op, Status::NOT_CONNECTED, format!("{self:?} is closed")));
        }
        match self.failed.get() {
            Status::OK => Ok(self.handle.get()),
            status => Err(UcxError::new(op, status, format!("{self:?} has failed; close it and connect again"))),
        }
    }

    /// One operation of the owner's has ended.
    pub(super) fn ended(&self) {
        self.in_flight.set(self.in_flight.get().saturating_sub(1));
    }

    /// Starts closing, unless that was done before.
    pub(super) fn start_close(self: &Rc<Self>, force: bool) {
        if self.state.get() != EndpointState::Open {
            return;
        }
        self.state.set(EndpointState::Closing);
        // Waiting for a failed peer's flush would serve nobody.
        let force = force || !self.failed.get().is_ok();
        let handle = self.handle.replace(ptr::null_mut());
        let posted = self.worker.operations.post(
            Purpose::Close,
            |operation| operation.owner = Some(OperationOwner { endpoint: Rc::clone(self), rkey: None }),
            |_, param| {
                if force {
                    param.op_attr_mask |= ucx_sys::UCP_OP_ATTR_FIELD_FLAGS.0;
                    param.flags = ucx_sys::UCP_EP_CLOSE_FLAG_FORCE.0;
                }
                // SAFETY: the endpoint was open until now and is closed once: the handle is gone from the core.
                unsafe { self.api().ucp_ep_close_nbx(handle, param) }
            },
        );
        match posted {
            Ok(Posted::Pending) => {}
            // "Resources are released and the endpoint can no longer be used", says UCX of a failed close.
            Ok(Posted::Done) | Err(_) => self.closed(),
        }
    }

    /// UCX has released the endpoint; no error callback will come.
    pub(super) fn closed(&self) {
        self.state.set(EndpointState::Closed);
        self.worker.forget_endpoint(self.id);
    }
}

impl fmt::Debug for EndpointCore {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.is_empty() {
            write!(out, "endpoint {}", self.id)
        } else {
            write!(out, "endpoint {} ({})", self.id, self.name)
        }
    }
}

/// UCX's callback when the connection failed. Notes it and nothing more.
pub(super) unsafe extern "C" fn on_error(core: *mut c_void, _endpoint: ucp_ep_h, status: ucs_status_t) {
    // SAFETY: the argument is the core's address, and the worker holds the core until UCX has closed the
    // endpoint, after which this is not called. All that is changed lies in cells.
    let core = unsafe { &*core.cast::<EndpointCore>() };
    if core.failed.get().is_ok() {
        core.failed.set(Status::from_raw(status));
        core.worker.failures.push((core.id, Status::from_raw(status)));
    }
}

/// The right to read and write one registered range of a peer's memory. It holds for the endpoint that unpacked it.
///
/// Operations under way hold it. It keeps the worker alive, not the connection: after the endpoint was
/// closed it is useless and harmless.
pub struct Rkey {
    endpoint: Rc<EndpointCore>,
    handle: ucp_rkey_h,
    base: u64,
    len: u64,
    kind: MemoryKind,
}

impl Rkey {
    pub(super) fn unpack(endpoint: &Rc<EndpointCore>, bytes: &[u8]) -> Result<Rc<Self>, UcxError> {
        const OP: &str = "ucp_ep_rkey_unpack";
        let (base, len, kind, packed) = memory::parse_rkey(bytes)?;
        let ep = endpoint.open_handle(OP)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the endpoint is open. UCX reads as many bytes as they themselves say, without knowing their
        // length: the envelope's checksum vouches that they are what a UCX packed.
        let status = unsafe { endpoint.api().ucp_ep_rkey_unpack(ep, packed.as_ptr().cast(), &mut handle) };
        Status::from_raw(status).check(OP, || {
            format!(
                "{len} bytes of {kind} memory at {base:#x} of {endpoint:?}; do both sides share a transport for it?"
            )
        })?;
        Ok(Rc::new(Self { endpoint: Rc::clone(endpoint), handle, base, len, kind }))
    }

    /// The first address, in the peer's address space.
    pub fn base(&self) -> u64 {
        self.base
    }

    pub(super) fn handle(&self) -> ucp_rkey_h {
        self.handle
    }

    pub(super) fn endpoint(&self) -> &Rc<EndpointCore> {
        &self.endpoint
    }

    /// Refuses a range that leaves the peer's memory: UCX's emulation of one-sided operations over TCP does
    /// not check it, and the peer would crash.
    pub(super) fn check(&self, op: &'static str, addr: u64, len: usize) -> Result<(), UcxError> {
        let end = addr.checked_add(len as u64);
        match end {
            // base + len does not wrap: `parse_rkey` checked it.
            Some(end) if addr >= self.base && end <= self.base + self.len => Ok(()),
            _ => Err(UcxError::new(
                op,
                Status::OUT_OF_RANGE,
                format!("{len} bytes at the remote address {addr:#x} leave {self:?}"),
            )),
        }
    }
}

impl Drop for Rkey {
    fn drop(&mut self) {
        // SAFETY: unpacked by ucp_ep_rkey_unpack, destroyed once; operations that use it would hold an Rc. UCX
        // keeps rkeys per worker, and the endpoint's core keeps the worker, so a closed endpoint is no matter.
        unsafe { self.endpoint.api().ucp_rkey_destroy(self.handle) };
    }
}

impl fmt::Debug for Rkey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "the peer's {} bytes of {} memory at {:#x}", self.len, self.kind, self.base)
    }
}
