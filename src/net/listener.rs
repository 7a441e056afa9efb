//! The handshake listener: a ZMQ ROUTER on a thread of its own, which passes each request to a [`RequestHandler`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::net::client::PIPELINE;
use crate::net::connections::Connections;
use crate::net::flags::ListenerFlags;
use crate::net::{Address, host_port};
use crate::proto::handshake::ClientId;
use crate::proto::wire::limits::{MAX_QUERY_BYTES, MAX_REQUEST_BYTES};
use crate::sys::thread::spawn;

/// Frames of a request that are kept: the sender's identity, an optional empty delimiter, the request, and one more to
/// tell that there were too many.
const MAX_FRAMES: usize = 4;

/// Requests answered before the stop signal is checked again.
const BATCH: usize = 64;

/// Requests queued per client; ZMQ reads no more of its connection until some are answered.
const REQUESTS: i32 = 8;

/// Replies queued per client; one that does not read loses more, and asks again. Our clients wait for at most 4 at a time
/// ([`PIPELINE`], and 4 in protocol version 4). ZMQ learns of what was read only when that is half of the bound, so that of
/// 6 there is room for 4 at any time.
const REPLIES: i32 = 6;
const _: () = assert!(REPLIES as usize / 2 + 1 >= 4 && 4 >= PIPELINE);

/// The longest request where none brings metadata. A query over its own limit gets a refusal, up to here; a longer one ends
/// its connection.
const MAX_PLAIN_BYTES: usize = 4 * MAX_QUERY_BYTES;

/// When a connection that says nothing is asked whether its host is still there, in seconds; how often again, and how
/// often in vain.
const KEEPALIVE: (i32, i32, i32) = (30, 10, 3);

/// How long the port may stay taken after the listener's own socket was closed.
const REBIND_TIME: Duration = Duration::from_secs(30);
const REBIND_STEP: Duration = Duration::from_millis(10);

/// How long a client may take for ZMQ's own greeting, in milliseconds.
const GREETING_MS: i32 = 10_000;

/// Errors in a row, without a request in between, after which the thread gives up.
const MAX_ERRORS: u32 = 100;

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerConfig {
    /// The addresses to bind and to advertise, from [`crate::net::choose`].
    pub address: Address,
    /// The TCP port; 0 takes a free one.
    pub port: u16,
    /// True if requests bring metadata, and so may be long.
    pub pushes: bool,
}

/// Answers a listener's requests, on its thread, some of them later.
pub trait RequestHandler: Send {
    /// The reply to a request, whatever its bytes are; `None`: it comes later, by [`RequestHandler::poll_reply`]. `client` names the
    /// client as long as it is connected. Must bound its own work; a panic in it costs that reply only.
    fn answer(&mut self, client: &[u8], request: &[u8]) -> Option<Vec<u8>>;

    /// The next reply that was not given at once, and for whom it is. Asked after each batch of requests and after
    /// [`Listener::wake`].
    fn poll_reply(&mut self) -> Option<(ClientId, Vec<u8>)> {
        None
    }
}

/// A function from a request to its reply.
struct ImmediateHandler<F>(F);

impl<F: FnMut(&[u8]) -> Vec<u8> + Send> RequestHandler for ImmediateHandler<F> {
    fn answer(&mut self, _: &[u8], request: &[u8]) -> Option<Vec<u8>> {
        Some((self.0)(request))
    }
}

/// A running listener. Dropping it stops the thread and frees the port.
#[derive(Debug)]
pub struct Listener {
    host: String,
    port: u16,
    flags: Arc<ListenerFlags>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// As [`Listener::bind_handler`], for a function that answers every request at once.
    ///
    /// # Errors
    /// Those of [`Listener::bind_handler`].
    pub fn bind(config: &ListenerConfig, answer: impl FnMut(&[u8]) -> Vec<u8> + Send + 'static) -> Result<Listener> {
        Listener::bind_handler(config, ImmediateHandler(answer))
    }

    /// Binds, and only then starts the thread `kvf-listener`. It passes every request's bytes to `handler` and sends
    /// back what that returns.
    ///
    /// # Errors
    /// [`ErrorKind::AddressInUse`] when the port is taken; [`ErrorKind::InvalidArgument`] when the address is not this
    /// host's or the port needs a privilege; [`ErrorKind::Io`] when ZMQ or the system refuses anything else.
    pub fn bind_handler(config: &ListenerConfig, handler: impl RequestHandler + 'static) -> Result<Listener> {
        let mut server = Server {
            context: zmq::Context::new(),
            config: config.clone(),
            sockets: None,
            number: 0,
            errors: 0,
            log: LogLimit::default(),
        };
        let port = server.open()?;
        // The same one if the socket is made anew.
        server.config.port = port;
        let flags = Arc::new(ListenerFlags::new()?);
        let host = config.address.advertise.to_string();
        if let Some(note) = &config.address.note {
            log::warn!("kvferry listener: {note}");
        }
        log::info!("kvferry listener: bound to {}, advertising {}", server.place(), host_port(&host, port));
        let its = Arc::clone(&flags);
        let thread = spawn("kvf-listener", move || thread_main(&its, server, handler))
            .map_err(|e| Error::new(ErrorKind::Io, format!("the listener's thread cannot be started: {e}")))?;
        Ok(Listener { host, port, flags, thread: Some(thread) })
    }

    /// The address to tell others, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port that is bound.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// True if the thread serves requests. When false without a [`Listener::shutdown`], [`Listener::failure`] says why.
    pub fn is_alive(&self) -> bool {
        self.flags.is_alive()
    }

    /// Why the thread gave up, if it did.
    pub fn failure(&self) -> Option<Error> {
        self.flags.failure()
    }

    /// Messages received so far, malformed ones included.
    pub fn requests(&self) -> u64 {
        self.flags.requests()
    }

    /// Wakes the thread to send deferred replies.
    pub fn wake(&self) {
        self.flags.wake();
    }

    /// Stops the thread, drops unsent replies, frees the port, and waits for all of that. Harmless when repeated.
    pub fn shutdown(&mut self) {
        self.flags.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("kvferry listener: the thread ended by a panic");
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn refused(what: &str, e: zmq::Error) -> Error {
    Error::new(ErrorKind::Io, format!("ZMQ refused {what}: {e}"))
}

fn configure(router: &zmq::Socket, config: &ListenerConfig) -> zmq::Result<()> {
    router.set_ipv6(config.address.bind.is_ipv6())?;
    router.set_linger(0)?;
    let longest = if config.pushes { MAX_REQUEST_BYTES } else { MAX_PLAIN_BYTES };
    router.set_maxmsgsize(i64::try_from(longest).unwrap_or(i64::MAX))?;
    router.set_sndhwm(REPLIES)?;
    router.set_rcvhwm(REQUESTS)?;
    router.set_handshake_ivl(GREETING_MS)?;
    // What is dropped is an error and not silence.
    router.set_router_mandatory(true)?;
    let (idle, interval, count) = KEEPALIVE;
    router.set_tcp_keepalive(1)?;
    router.set_tcp_keepalive_idle(idle)?;
    router.set_tcp_keepalive_intvl(interval)?;
    router.set_tcp_keepalive_cnt(count)
}

/// True if the kernel makes IPv6 sockets and takes their wildcard.
fn has_ipv6() -> bool {
    std::net::UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok()
}

/// The bound address, for people.
fn place(config: &ListenerConfig) -> String {
    match config.address.bind {
        ip if !ip.is_unspecified() => host_port(&ip.to_string(), config.port),
        IpAddr::V4(_) => format!("port {} of all IPv4 addresses", config.port),
        IpAddr::V6(_) => format!("port {} of all addresses", config.port),
    }
}

fn bind_error(config: &ListenerConfig, e: zmq::Error) -> Error {
    let (ip, at) = (config.address.bind, place(config));
    let (kind, text) = match e {
        zmq::Error::EADDRINUSE => (
            ErrorKind::AddressInUse,
            format!(
                "the handshake listener cannot bind {at}: port {} is in use; stop the process that has it, configure \
                 another port, or port 0 to take a free one",
                config.port
            ),
        ),
        zmq::Error::EADDRNOTAVAIL | zmq::Error::ENODEV => (
            ErrorKind::InvalidArgument,
            format!(
                "the handshake listener cannot bind {at}: {ip} is not an address of this host ({}); configure one that \
                 is, or leave it out to bind all",
                super::address::own_text()
            ),
        ),
        zmq::Error::EACCES => (
            ErrorKind::InvalidArgument,
            format!(
                "the handshake listener may not bind {at}: ports under 1024 need a privilege; configure a higher port"
            ),
        ),
        other => (ErrorKind::Io, format!("the handshake listener cannot bind {at}: {other}")),
    };
    Error::new(kind, text)
}

fn bound_port(router: &zmq::Socket) -> Result<u16> {
    let endpoint = router.get_last_endpoint().map_err(|e| refused("to name its endpoint", e))?.unwrap_or_default();
    endpoint
        .rsplit_once(':')
        .and_then(|(_, port)| port.parse().ok())
        .ok_or_else(|| Error::new(ErrorKind::Io, format!("ZMQ names its endpoint {endpoint:?}, which has no port")))
}

fn thread_main(flags: &ListenerFlags, mut server: Server, mut handler: impl RequestHandler) {
    let ended = catch_unwind(AssertUnwindSafe(|| server.serve(flags, &mut handler)));
    drop(server);
    let failure = match ended {
        Ok(Ok(())) => None,
        Ok(Err(e)) => Some(e),
        Err(_) => Some(Error::new(ErrorKind::Internal, "the handshake listener's thread panicked")),
    };
    if let Some(e) = failure {
        log::error!("kvferry listener: stopped serving handshakes: {e}");
        flags.fail(e);
    }
    flags.end();
}

/// The state of the listener's thread.
struct Server {
    context: zmq::Context,
    /// With the port that is bound.
    config: ListenerConfig,
    sockets: Option<(zmq::Socket, Connections)>,
    /// Counts the sockets that were made.
    number: u64,
    errors: u32,
    log: LogLimit,
}

impl Server {
    /// The bound address, for people.
    fn place(&self) -> String {
        place(&self.config)
    }

    /// Makes and binds the socket; gives its port.
    fn open(&mut self) -> Result<u16> {
        match self.open_at(self.config.address.bind) {
            // Without IPv6, all addresses are those of IPv4.
            Err(e) if self.config.address.bind == IpAddr::V6(Ipv6Addr::UNSPECIFIED) && !has_ipv6() => {
                log::debug!("kvferry listener: this host has no IPv6 ({e}): IPv4 only");
                self.config.address.bind = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
                self.open_at(self.config.address.bind)
            }
            other => other,
        }
    }

    fn open_at(&mut self, ip: IpAddr) -> Result<u16> {
        let router = self.context.socket(zmq::ROUTER).map_err(|e| refused("a ROUTER socket", e))?;
        configure(&router, &self.config).map_err(|e| refused("the listener's socket options", e))?;
        self.number += 1;
        let connections = Connections::watch(&self.context, &router, self.number)
            .map_err(|e| refused("to watch the listener's connections", e))?;
        let endpoint = super::endpoint(&ip.to_string(), self.config.port)?;
        router.bind(&endpoint).map_err(|e| bind_error(&self.config, e))?;
        let port = bound_port(&router)?;
        self.sockets = Some((router, connections));
        Ok(port)
    }

    /// Closes every connection and opens a new socket.
    fn reopen(&mut self, flags: &ListenerFlags) -> Result<()> {
        self.sockets = None;
        let begin = Instant::now();
        loop {
            match self.open() {
                Ok(_) => return Ok(()),
                // ZMQ closes sockets on a thread of its own.
                Err(_) if flags.is_stopped() => return Ok(()),
                Err(e) if begin.elapsed() >= REBIND_TIME => return Err(e),
                Err(_) => std::thread::sleep(REBIND_STEP),
            }
        }
    }

    fn serve(&mut self, flags: &ListenerFlags, handler: &mut impl RequestHandler) -> Result<()> {
        while !flags.is_stopped() {
            let Some((router, connections)) = &mut self.sockets else { return Ok(()) };
            let mut items = [
                router.as_poll_item(zmq::POLLIN),
                zmq::PollItem::from_fd(flags.fd(), zmq::POLLIN),
                connections.poll_item(),
            ];
            let outcome = match zmq::poll(&mut items, -1) {
                Ok(_) => {
                    // Before the handler is asked: what it knows later raises it again.
                    flags.clear();
                    serve_batch(flags, router, connections, handler, &mut self.errors)
                        .map(|()| send_later(router, connections, handler))
                        .and_then(|()| connections.update())
                }
                Err(zmq::Error::EINTR) => Ok(()),
                Err(e) => Err(e),
            };
            if let Err(e) = outcome {
                self.errors += 1;
                if let Some(left_out) = self.log.pass(Instant::now()) {
                    log::warn!("kvferry listener: {e} ({left_out} similar lines suppressed)");
                }
                if self.errors >= MAX_ERRORS {
                    return Err(Error::new(ErrorKind::Io, format!("{MAX_ERRORS} errors in a row, the last: {e}")));
                }
            }
            let (open, most) = (connections.open(), connections.most());
            if open > most {
                if let Some(left_out) = self.log.pass(Instant::now()) {
                    log::warn!(
                        "kvferry listener: {open} connections are open and {most} may be; all are closed, clients \
                         connect again by themselves ({left_out} similar lines suppressed)"
                    );
                }
                self.reopen(flags)?;
            }
        }
        Ok(())
    }
}

fn serve_batch(
    flags: &ListenerFlags,
    router: &zmq::Socket,
    connections: &mut Connections,
    handler: &mut impl RequestHandler,
    errors: &mut u32,
) -> zmq::Result<()> {
    for _ in 0..BATCH {
        let frames = match receive(router) {
            Ok(frames) => frames,
            Err(zmq::Error::EAGAIN) => return Ok(()),
            Err(zmq::Error::EINTR) => continue,
            Err(e) => return Err(e),
        };
        *errors = 0;
        flags.count_request();
        // REQ sockets put an empty frame before the request, DEALER sockets need not. What has another form is handed
        // on as an empty request, so that its sender is told that it was malformed.
        let (identity, delimiter, request): (&[u8], bool, &[u8]) = match frames.as_slice() {
            [identity, request] => (identity, false, request),
            [identity, empty, request] if empty.is_empty() => (identity, true, request),
            [identity, second, ..] => (identity, second.is_empty(), &[]),
            _ => continue,
        };
        let client = [&[delimiter.into()], identity].concat();
        let Ok(reply) = catch_unwind(AssertUnwindSafe(|| handler.answer(&client, request))) else {
            log::error!("kvferry listener: answering a request of {} bytes panicked; it gets no reply", request.len());
            continue;
        };
        if let Some(reply) = reply {
            send(router, connections, &client, &reply);
        }
    }
    Ok(())
}

/// Sends the replies that were not given at once.
fn send_later(router: &zmq::Socket, connections: &mut Connections, handler: &mut impl RequestHandler) {
    loop {
        match catch_unwind(AssertUnwindSafe(|| handler.poll_reply())) {
            Ok(Some((client, reply))) => send(router, connections, &client, &reply),
            Ok(None) => return,
            Err(_) => log::error!("kvferry listener: making a later reply panicked; it is not sent"),
        }
    }
}

/// Sends a reply to a client, whose name begins with whether it puts an empty frame before what it sends.
fn send(router: &zmq::Socket, connections: &mut Connections, client: &[u8], reply: &[u8]) {
    let Some((delimiter, identity)) = client.split_first() else { return };
    connections.replied(reply.len(), REPLIES as usize);
    let mut out: Vec<&[u8]> = vec![identity];
    if *delimiter != 0 {
        out.push(&[]);
    }
    out.push(reply);
    let mut sent = router.send_multipart(out.as_slice(), zmq::DONTWAIT);
    // ZMQ looks about once in a millisecond for what clients have read, and whenever it is asked for events.
    if sent == Err(zmq::Error::EAGAIN) {
        sent = router.get_events().and_then(|_| router.send_multipart(out, zmq::DONTWAIT));
    }
    if let Err(e) = sent {
        log::debug!("kvferry listener: a reply was dropped, its client is gone or does not read: {e}");
    }
}

/// One message without waiting, at most [`MAX_FRAMES`] of its frames.
fn receive(router: &zmq::Socket) -> zmq::Result<Vec<zmq::Message>> {
    let mut frames = Vec::with_capacity(MAX_FRAMES);
    loop {
        let frame = router.recv_msg(zmq::DONTWAIT)?;
        let more = frame.get_more();
        if frames.len() < MAX_FRAMES {
            frames.push(frame);
        }
        if !more {
            return Ok(frames);
        }
    }
}
