//! The number of a listener's connections, and its limit.
//!
//! ZMQ has no limit of its own: it accepts until the process has no file descriptor left, and then spins. It tells each
//! connection that comes and goes to a monitor, which is asked here. When there are too many, the listener closes its
//! socket and makes a new one. Clients connect again by themselves and ask again; a client that held connections for nothing
//! has to start over.

use rustix::process::{Resource, getrlimit};

/// The most connections, however many descriptors there are.
const MOST: usize = 16_384;
/// The fewest that are allowed, however scarce descriptors are.
const FEWEST: usize = 64;
/// The most memory that unread replies may take all together.
const UNREAD_BYTES: usize = 3 << 30;

/// The connections of one listening socket.
pub(super) struct Connections {
    monitor: zmq::Socket,
    open: usize,
    /// By file descriptors.
    most: usize,
    /// The most memory that unread replies may take, per connection.
    unread: usize,
}

impl Connections {
    /// Begins to count the connections of `router`, which is not bound yet. `number`: another one for each socket of a
    /// context.
    pub(super) fn watch(context: &zmq::Context, router: &zmq::Socket, number: u64) -> zmq::Result<Connections> {
        let name = format!("inproc://connections-{number}");
        let events = zmq::SocketEvent::ACCEPTED as i32 | zmq::SocketEvent::DISCONNECTED as i32;
        router.monitor(&name, events)?;
        let monitor = context.socket(zmq::PAIR)?;
        // Without a bound: ZMQ's own thread would wait for room.
        monitor.set_rcvhwm(0)?;
        monitor.connect(&name)?;
        Ok(Connections { monitor, open: 0, most: most(free_descriptors()), unread: 0 })
    }

    /// Readable when connections have come or gone.
    pub(super) fn poll_item(&self) -> zmq::PollItem<'_> {
        self.monitor.as_poll_item(zmq::POLLIN)
    }

    /// Takes note of what has come and gone.
    pub(super) fn update(&mut self) -> zmq::Result<()> {
        loop {
            let event = match self.monitor.recv_bytes(zmq::DONTWAIT) {
                Ok(event) => event,
                Err(zmq::Error::EAGAIN) => return Ok(()),
                Err(zmq::Error::EINTR) => continue,
                Err(e) => return Err(e),
            };
            // The second frame has the connection's address.
            while self.monitor.get_rcvmore()? {
                self.monitor.recv_bytes(zmq::DONTWAIT)?;
            }
            let Some((kind, _)) = event.split_first_chunk::<2>() else { continue };
            let kind = i32::from(u16::from_ne_bytes(*kind));
            if kind == zmq::SocketEvent::ACCEPTED as i32 {
                self.open = self.open.saturating_add(1);
            } else if kind == zmq::SocketEvent::DISCONNECTED as i32 {
                self.open = self.open.saturating_sub(1);
            }
        }
    }

    /// A reply of `bytes` was sent, of which ZMQ may hold `queue` for a client that does not read.
    pub(super) fn replied(&mut self, bytes: usize, queue: usize) {
        self.unread = self.unread.max(bytes.saturating_mul(queue));
    }

    /// How many there are.
    pub(super) fn open(&self) -> usize {
        self.open
    }

    /// How many there may be.
    pub(super) fn most(&self) -> usize {
        let by_memory = UNREAD_BYTES.checked_div(self.unread).unwrap_or(MOST);
        self.most.min(by_memory.max(FEWEST))
    }
}

/// Descriptors that the process may still open.
fn free_descriptors() -> usize {
    let limit = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX));
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    limit.saturating_sub(open)
}

/// Half of what is free is left to the others of the process.
fn most(free: usize) -> usize {
    (free / 2).clamp(FEWEST, MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_free_descriptors_are_left_to_others() {
        assert_eq!([most(1000), most(10), most(usize::MAX)], [500, FEWEST, MOST]);
    }
}
