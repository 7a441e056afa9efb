//! Ports of tests.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// A port of its own that nobody listens on, below those that the kernel gives to whoever asks for any.
/// Each process of the tests begins with another one.
pub fn unused_port() -> u16 {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    let next =
        || 20_000 + (std::process::id().wrapping_mul(16).wrapping_add(TRIED.fetch_add(1, Ordering::Relaxed))) % 12_000;
    let mut ports = std::iter::repeat_with(|| next() as u16).take(12_000);
    ports.find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()).unwrap()
}
