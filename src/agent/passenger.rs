//! A passenger rides on the ferry thread and uses the agent without queues.

use std::time::Instant;

use super::ferry::Ferry;

/// A driver that runs on an agent's ferry thread, such as `connector::Worker`'s.
///
/// It is made on that thread (by the function given to [`Agent::start_with`](super::Agent::start_with)), is called only
/// there, and is dropped there; so it need not be `Send`. Nothing in it may block. With a passenger, all events are
/// its own: the handle's `poll_event` returns none.
pub trait Passenger {
    /// Called after every wake-up of the loop, at least whenever an event, a ready socket, a
    /// [`Waker`](super::Waker) or the returned time asks for it; spurious calls happen. Takes all events from
    /// [`Ferry::poll_event`] and does what is to be done. Returns when it wants to be called again at the latest;
    /// `None`: only when something happens.
    fn turn(&mut self, ferry: &mut Ferry<'_>) -> Option<Instant>;

    /// Adds the ZMQ sockets (or file descriptors) whose readiness should wake the loop.
    fn poll_items<'a>(&'a self, items: &mut Vec<zmq::PollItem<'a>>) {
        let _ = items;
    }

    /// The agent is shutting down: called once, before the agent cancels what is still in flight. Further turns
    /// follow, in which the transfers' last events arrive, until [`Passenger::finished`] says yes and nothing is in
    /// flight, or the shutdown's time is up.
    fn shut_down(&mut self, ferry: &mut Ferry<'_>) {
        let _ = ferry;
    }

    /// During a shutdown: whether the passenger has nothing left to do.
    fn finished(&self) -> bool {
        true
    }
}
