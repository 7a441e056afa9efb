//! What crosses the network between hosts of [`super::netns::Hosts`]: every frame on the bridge, put together again to
//! the TCP streams.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with};

use super::netns::Hosts;

const ROLE: &str = "KVFERRY_TEST_CAPTURE";

/// Linux's `ETH_P_ALL`, in the network's byte order.
const EVERYTHING: u32 = 0x0300;

/// A process in the bridge's namespace that keeps all frames.
pub struct Capture {
    child: Child,
    stdin: Option<ChildStdin>,
    output: std::process::ChildStdout,
}

/// Captures if this process was started for it; the test named `capture` of every binary that uses this calls it.
pub fn capture_if_child() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let protocol = Protocol::from_raw(std::num::NonZeroU32::new(EVERYTHING).unwrap());
    let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::NONBLOCK, Some(protocol)).unwrap();
    set_socket_recv_buffer_size_force(&socket, 64 << 20).unwrap();
    let mut out = std::io::stdout().lock();
    out.write_all(b"\n@capturing\n").unwrap();
    out.flush().unwrap();
    let mut frames = Vec::new();
    let mut buffer = vec![0u8; 1 << 17];
    let mut stdin = std::io::stdin();
    let done = std::thread::spawn(move || {
        let mut end = Vec::new();
        stdin.read_to_end(&mut end).unwrap();
    });
    loop {
        let last = done.is_finished();
        while let Ok((_, len)) = recv(&socket, &mut buffer[..], RecvFlags::empty()) {
            frames.push(buffer[..len].to_vec());
        }
        if last {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    for frame in frames {
        out.write_all(&(frame.len() as u32).to_le_bytes()).unwrap();
        out.write_all(&frame).unwrap();
    }
    out.flush().unwrap();
    drop(out);
    std::process::exit(0);
}

impl Capture {
    /// Starts capturing; every frame sent from now on is kept.
    pub fn start(hosts: &Hosts) -> Capture {
        let mut child = Command::new("ip")
            .args(["netns", "exec", hosts.switch()])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "capture", "--nocapture", "--test-threads=1"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let mut output = child.stdout.take().unwrap();
        // Byte by byte: what follows the line is not text.
        let mut line = Vec::new();
        while !line.ends_with(b"@capturing\n") {
            let mut byte = [0];
            output.read_exact(&mut byte).unwrap();
            line.push(byte[0]);
        }
        Capture { child, stdin, output }
    }

    /// Ends it. All TCP streams, one after the other.
    pub fn streams(mut self) -> Vec<u8> {
        drop(self.stdin.take());
        let mut reader = BufReader::new(&mut self.output);
        let mut streams: BTreeMap<Vec<u8>, BTreeMap<u32, Vec<u8>>> = BTreeMap::new();
        while !reader.fill_buf().unwrap().is_empty() {
            let mut len = [0; 4];
            reader.read_exact(&mut len).unwrap();
            let mut frame = vec![0; u32::from_le_bytes(len) as usize];
            reader.read_exact(&mut frame).unwrap();
            if let Some((stream, sequence, data)) = tcp(&frame) {
                let kept = streams.entry(stream).or_default().entry(sequence).or_default();
                if data.len() > kept.len() {
                    *kept = data;
                }
            }
        }
        assert!(self.child.wait().unwrap().success());
        let mut all = Vec::new();
        for segments in streams.into_values() {
            let mut next = None;
            for (sequence, data) in segments {
                // What was sent twice is in one piece here; a gap, which the capture has lost, is left out.
                let known = next.map_or(0, |next: u32| next.saturating_sub(sequence) as usize).min(data.len());
                next = Some(sequence.wrapping_add(data.len() as u32).max(next.unwrap_or(0)));
                all.extend_from_slice(&data[known..]);
            }
        }
        all
    }
}

/// Of a frame with TCP in IPv4: which stream, the sequence number, the data.
fn tcp(frame: &[u8]) -> Option<(Vec<u8>, u32, Vec<u8>)> {
    let ip = frame.get(14..).filter(|_| frame.get(12..14) == Some(&[8, 0]))?;
    let ip_header = usize::from(ip[0] & 15) * 4;
    if ip.get(9) != Some(&6) {
        return None;
    }
    let total = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
    // 0 where the kernel has put several segments into one frame.
    let ip = if total == 0 { ip } else { ip.get(..total)? };
    let tcp = ip.get(ip_header..)?;
    let data = tcp.get(usize::from(tcp.get(12)? >> 4) * 4..)?;
    if data.is_empty() {
        return None;
    }
    let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
    Some(([&ip[12..20], &tcp[..4]].concat(), sequence, data.to_vec()))
}
