//! A UCX worker: the engine that one thread at a time drives.

use std::cell::Cell;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ucx_sys::{Ucp, ucp_am_handler_param_t, ucp_worker_attr_t, ucp_worker_h, ucp_worker_params_t};

use super::am::{AmMessage, MessageSink, MessageSlot, Messages, on_message};
use super::context::{Context, c_string};
use super::cores::WorkerCore;
use super::endpoint::Endpoint;
use super::envelope::{self, EnvelopeKind};
use super::queue::{Queue, change};
use super::request::{Completion, OperationSet};
use super::status::{Status, UcxError};

/// How long dropping a worker waits for UCX to end what is under way. Forced closes end within milliseconds;
/// what needs longer waits for a peer that gives no sign.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// How a worker is made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerOptions {
    /// Names the worker in UCX's own logs. May be empty; at most 31 bytes are kept.
    pub name: String,
    /// The longest accepted active message (its data, in bytes). Longer ones, and those that are sent by rendezvous,
    /// are dropped and counted.
    pub max_message: usize,
}

impl Default for WorkerOptions {
    /// No name, messages up to 64 MiB: far above what kvferry's own messages need.
    fn default() -> Self {
        Self { name: String::new(), max_message: 64 << 20 }
    }
}

/// The result of [`Worker::arm`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Armed {
    /// The event fd will become readable at the next event: sleeping on it is safe.
    Yes,
    /// There is work: call [`Worker::progress`] and empty the queues before trying again.
    Busy,
}

/// A UCX worker and all that happens on it, for one thread at a time. It is `!Send`, as are its endpoints and rkeys, which
/// share it by `Rc`: it goes to another thread only together with all of them (`sys::isolated`).
///
/// Dropping it closes all endpoints by force and drives UCX until every operation has ended, for at most ten
/// seconds; if UCX is not done then, the worker and all memory that UCX may still touch are leaked on
/// purpose, with an error in the log. [`close`](Self::close) does the same and tells.
pub struct Worker {
    core: Rc<WorkerCore>,
    drained: Cell<bool>,
}

impl Worker {
    /// Makes a worker.
    ///
    /// # Errors
    /// UCX's status when it cannot make one, or one with an event fd.
    pub fn with_options(context: &Arc<Context>, options: &WorkerOptions) -> Result<Self, UcxError> {
        let api = context.library().api();
        let name = c_string("worker name", &options.name)?;
        // SAFETY: all-zero is valid for this C structure of integers and pointers.
        let mut params: ucp_worker_params_t = unsafe { MaybeUninit::zeroed().assume_init() };
        params.field_mask =
            u64::from(ucx_sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE.0 | ucx_sys::UCP_WORKER_PARAM_FIELD_NAME.0);
        // One thread at a time, which need not be the one that made it.
        params.thread_mode = ucx_sys::UCS_THREAD_MODE_SERIALIZED;
        params.name = name.as_ptr();
        let mut handle = ptr::null_mut();
        // SAFETY: context and parameters are alive during the call, which copies what it keeps.
        let status = unsafe { api.ucp_worker_create(context.handle(), &params, &mut handle) };
        Status::from_raw(status).check("ucp_worker_create", String::new)?;
        let mut core = WorkerCore {
            context: Arc::clone(context),
            handle,
            event_fd: -1,
            max_header: 0,
            operations: OperationSet::new(),
            endpoints: Cell::default(),
            next_endpoint: Cell::new(1),
            failures: Queue::new(),
            completions: Queue::new(),
            messages: Rc::new(Messages::new(options.max_message)),
            slots: Cell::default(),
        };
        // SAFETY: the worker is alive; the descriptor goes into `event_fd`.
        let status = unsafe { api.ucp_worker_get_efd(handle, &mut core.event_fd) };
        Status::from_raw(status).check("ucp_worker_get_efd", || {
            "the transports in use cannot wake a sleeping thread; choose others (TLS)".to_owned()
        })?;
        let attr = query(api, handle, ucx_sys::UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER.0)?;
        core.max_header = attr.max_am_header;
        Ok(Self { core: Rc::new(core), drained: Cell::new(false) })
    }

    /// The context.
    pub fn context(&self) -> &Arc<Context> {
        &self.core.context
    }

    /// The longest header, in bytes, that [`Endpoint::send_am`] takes.
    pub fn max_header(&self) -> usize {
        self.core.max_header
    }

    /// The bytes with which a peer connects to this worker. They are UCX's worker address in a checked envelope.
    ///
    /// # Errors
    /// UCX's status.
    pub fn address(&self) -> Result<Vec<u8>, UcxError> {
        let (api, handle) = (self.core.api(), self.core.handle);
        let attr = query(api, handle, ucx_sys::UCP_WORKER_ATTR_FIELD_ADDRESS.0)?;
        if attr.address.is_null() {
            return Err(UcxError::new("ucp_worker_query", Status::NO_ELEM, "UCX gave no address"));
        }
        // SAFETY: UCX returned that many bytes, alive until they are released below.
        let bytes = unsafe { std::slice::from_raw_parts(attr.address.cast::<u8>(), attr.address_length) };
        let sealed = envelope::seal(EnvelopeKind::Address, bytes);
        // SAFETY: the address of ucp_worker_query above, released once and not used again.
        unsafe { api.ucp_worker_release_address(handle, attr.address) };
        sealed
    }

    /// Connects to the worker that exported `address`. UCX connects in the background; a peer that cannot be
    /// reached shows as a failed endpoint. The `name`, which may be empty, is for errors and UCX's own logs.
    ///
    /// # Errors
    /// [`Status::MALFORMED`] when the bytes are not an exported address or are damaged, before UCX sees them;
    /// [`Status::UNREACHABLE`] when no transport is shared; UCX's status.
    pub fn connect(&self, address: &[u8], name: &str) -> Result<Endpoint, UcxError> {
        let id = self.core.next_endpoint.get();
        self.core.next_endpoint.set(id.wrapping_add(1));
        Endpoint::connect(&self.core, id, address, name)
    }

    /// Accepts active messages of this id from now on. UCX drops those of other ids. Once per id is enough. The `sink`, if
    /// any, is offered the data of each.
    ///
    /// # Errors
    /// UCX's status.
    pub fn accept_messages(&self, id: u16, sink: Option<Rc<dyn MessageSink>>) -> Result<(), UcxError> {
        if change(&self.core.slots, |slots| slots.iter().any(|(known, _)| *known == id)) {
            return Ok(());
        }
        let slot = Box::into_raw(Box::new(MessageSlot::new(&self.core.messages, id, sink)));
        change(&self.core.slots, |slots| slots.push((id, slot)));
        // SAFETY: all-zero is valid for this C structure of integers, pointers and nullable functions.
        let mut param: ucp_am_handler_param_t = unsafe { MaybeUninit::zeroed().assume_init() };
        param.field_mask = u64::from(
            ucx_sys::UCP_AM_HANDLER_PARAM_FIELD_ID.0
                | ucx_sys::UCP_AM_HANDLER_PARAM_FIELD_FLAGS.0
                | ucx_sys::UCP_AM_HANDLER_PARAM_FIELD_CB.0
                | ucx_sys::UCP_AM_HANDLER_PARAM_FIELD_ARG.0,
        );
        param.id = u32::from(id);
        param.flags = ucx_sys::UCP_AM_FLAG_WHOLE_MSG.0;
        param.cb = Some(on_message);
        param.arg = slot.cast();
        // SAFETY: the worker is alive, and the slot lives until it is destroyed.
        let status = unsafe { self.core.api().ucp_worker_set_am_recv_handler(self.core.handle, &param) };
        Status::from_raw(status).check("ucp_worker_set_am_recv_handler", || format!("message id {id}"))
    }

    /// An empty buffer with room for `len` bytes. It is one that an earlier message was sent from, if there is one
    /// that is large enough. Fresh memory costs more than the copy into it.
    pub fn buffer(&self, len: usize) -> Vec<u8> {
        self.core.operations.buffer(len)
    }

    /// Lets UCX work and collects what has ended. True when anything happened. Never blocks.
    pub fn progress(&self) -> bool {
        self.core.progress()
    }

    /// The end of an operation, in the order of their ends.
    pub fn poll_completion(&self) -> Option<Completion> {
        self.core.completions.pop()
    }

    /// True if an active message has arrived that nobody has taken.
    pub fn has_messages(&self) -> bool {
        !self.core.messages.is_empty()
    }

    /// An active message that has arrived.
    pub fn poll_message(&self) -> Option<AmMessage> {
        self.core.messages.pop()
    }

    /// An endpoint whose connection failed, by its [`id`](Endpoint::id), and why. Each failure comes once. Its
    /// operations end with errors; the endpoint is of no more use and should be dropped.
    pub fn poll_failed_endpoints(&self) -> Option<(u64, Status)> {
        self.core.failures.pop()
    }

    /// The number of arrived messages that were dropped: too long, no memory, or [refused](Self::refused_announcements).
    pub fn dropped_messages(&self) -> u64 {
        self.core.messages.dropped()
    }

    /// The number of messages refused because they were announced by rendezvous. The sender's operation ends with
    /// [`Status::UNSUPPORTED`], its connection goes on.
    pub fn refused_announcements(&self) -> u64 {
        self.core.messages.refused()
    }

    /// The number of operations that UCX has not ended yet, closing endpoints included.
    pub fn in_flight(&self) -> usize {
        self.core.operations.live()
    }

    /// Becomes readable at the next event after [`arm`](Self::arm) said [`Armed::Yes`]. UCX owns it: poll it,
    /// and neither read nor close it.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: UCX keeps the descriptor open as long as the worker, which the borrow does not outlive.
        unsafe { BorrowedFd::borrow_raw(self.core.event_fd) }
    }

    /// Makes the event fd tell of the next event. To be called before sleeping on it, each time.
    ///
    /// # Errors
    /// UCX's status when it can do neither.
    pub fn arm(&self) -> Result<Armed, UcxError> {
        if self.core.has_news() {
            return Ok(Armed::Busy);
        }
        // SAFETY: the worker is alive and no other thread has it (`Worker`).
        match unsafe { self.core.api().ucp_worker_arm(self.core.handle) } {
            ucx_sys::UCS_OK => Ok(Armed::Yes),
            ucx_sys::UCS_ERR_BUSY => Ok(Armed::Busy),
            status => Err(UcxError::new("ucp_worker_arm", Status::from_raw(status), "")),
        }
    }

    /// Closes all endpoints by force and waits until UCX has ended every operation. Waits at most `limit`.
    /// Completions that were not polled are lost. Endpoints that the caller still has are closed.
    ///
    /// # Errors
    /// [`Status::TIMED_OUT`] when UCX was not done in time. Then the worker and everything that it may still
    /// touch is leaked: memory that was under transfer must not be freed or reused.
    pub fn close(self, limit: Duration) -> Result<(), UcxError> {
        self.drain(limit)
    }

    fn drain(&self, limit: Duration) -> Result<(), UcxError> {
        if self.drained.replace(true) || self.core.drain(limit) {
            return Ok(());
        }
        std::mem::forget(Rc::clone(&self.core));
        let detail = format!(
            "{} operations had not ended after {limit:?}; the worker and their memory are leaked",
            self.core.operations.live()
        );
        Err(UcxError::new("close worker", Status::TIMED_OUT, detail))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Err(error) = self.drain(DRAIN_LIMIT) {
            log::error!("{error}");
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Worker")
            .field("in_flight", &self.in_flight())
            .field("dropped_messages", &self.dropped_messages())
            .finish_non_exhaustive()
    }
}

fn query(api: &Ucp, handle: ucp_worker_h, fields: u32) -> Result<ucp_worker_attr_t, UcxError> {
    // SAFETY: all-zero is valid for this C structure of integers and pointers.
    let mut attr: ucp_worker_attr_t = unsafe { MaybeUninit::zeroed().assume_init() };
    attr.field_mask = u64::from(fields);
    // SAFETY: the worker is alive, and UCX writes only the fields in the mask.
    let status = unsafe { api.ucp_worker_query(handle, &mut attr) };
    Status::from_raw(status).check("ucp_worker_query", String::new)?;
    Ok(attr)
}
