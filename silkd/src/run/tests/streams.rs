//! Bytes in, bytes out.

use bytes::Bytes;
use sandbox_protocol::{
    limits::{CHUNK_IN, CHUNK_OUT},
    v1::{ExecIn, ExecStart, StdinClose, exec_in::M, exec_out},
};

use super::harness::{Guest, command, eventually, of, sh, with_stdin, within};

/// Bytes that look like nothing in particular, the same for the same place.
fn noise(len: usize) -> Vec<u8> {
    let mut x = 0x9e37_79b9_u32;
    let next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x.to_le_bytes()[0]
    };
    std::iter::repeat_with(next).take(len).collect()
}

#[tokio::test]
async fn no_stdin_is_immediate_eof() {
    let guest = Guest::start();
    let ran = guest.run(command(&[b"cat"])).await.unwrap();
    assert_eq!((ran.code(), &*ran.stdout), (0, &b""[..]));
    // The client's half stays open: it is not waited for.
    let call = guest.begin(of(command(&[b"cat"]))).await.unwrap();
    let input = call.input.clone();
    assert_eq!(call.finish().await.unwrap().code(), 0);
    drop(input);
    guest.end().await;
}

#[tokio::test]
async fn unread_client_stdin_does_not_hold_exit() {
    let guest = Guest::start();
    let call = guest.begin(with_stdin(sh("echo out"))).await.unwrap();
    let held = call.input.clone();
    let ran = call.finish().await.unwrap();
    assert_eq!((ran.code(), ran.text()), (0, "out\n"));
    drop(held);
    guest.end().await;
}

#[tokio::test]
async fn binary_stdin_counts() {
    let guest = Guest::start();
    for close in [true, false] {
        let mut call = guest.begin(with_stdin(command(&[b"wc", b"-c"]))).await.unwrap();
        call.send(M::Stdin(Bytes::from_static(b"\0\xff\n\r"))).await;
        let held = call.input.take();
        if close {
            let close = M::StdinClose(StdinClose {});
            held.as_ref()
                .unwrap()
                .send(ExecIn { m: Some(close) })
                .await
                .unwrap();
            // What comes behind the end is nobody's, and counted.
            let late = M::Stdin(Bytes::from_static(b"late"));
            held.as_ref()
                .unwrap()
                .send(ExecIn { m: Some(late) })
                .await
                .unwrap();
            let ran = call.finish().await.unwrap();
            assert_eq!(ran.text().trim(), "4");
        } else {
            drop(held);
            let ran = call.finish().await.unwrap();
            assert_eq!((ran.text().trim(), ran.exit.stdin_discarded), ("4", 0));
        }
    }
    guest.end().await;
}

#[tokio::test]
async fn echo_64_mib_full_duplex() {
    let data = Bytes::from(noise(4 * 1024 * 1024));
    let guest = Guest::start();
    let mut call = guest.begin(with_stdin(command(&[b"cat"]))).await.unwrap();
    let input = call.input.take().unwrap();
    let send = async {
        for chunk in data.chunks(CHUNK_IN) {
            let m = Some(M::Stdin(data.slice_ref(chunk)));
            input.send(ExecIn { m }).await.unwrap();
        }
        drop(input);
    };
    let (ran, ()) = tokio::join!(call.finish(), send);
    let ran = ran.unwrap();
    assert!(ran.stdout == data, "the echo differs");
    assert_eq!((ran.code(), ran.exit.stdin_discarded), (0, 0));
    guest.end().await;
}

#[tokio::test]
async fn a_program_may_stop_reading() {
    let guest = Guest::start();
    // It reads one line, closes its input and goes on.
    let script = "read line; exec <&-; echo got $line; while [ ! -e \"$MARK\" ]; do sleep 0.01; done; exit 7";
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("mark");
    let mut wanted = sh(script);
    wanted.env = vec![super::harness::var(b"MARK", mark.to_str().unwrap().as_bytes())];
    let mut call = guest.begin(with_stdin(wanted)).await.unwrap();
    call.send(M::Stdin(Bytes::from_static(b"one\n"))).await;
    assert_eq!(call.chunk().await, b"got one\n"[..]);
    for _ in 0..8 {
        call.send(M::Stdin(vec![b'x'; CHUNK_IN].into())).await;
    }
    call.input = None;
    drop(std::fs::File::create(&mark).unwrap());
    let ran = call.finish().await.unwrap();
    assert_eq!(ran.code(), 7);
    assert!(
        ran.exit.stdin_discarded > 0,
        "counted: {}",
        ran.exit.stdin_discarded
    );
    guest.end().await;
}

#[tokio::test]
async fn gib_of_output_flat_memory() {
    const BYTES: u64 = 128 * 1024 * 1024;
    let resident = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
        pages * 4096
    };
    let guest = Guest::start();
    let before = resident();
    let script = format!("yes | head -c {BYTES}");
    let mut call = guest.begin(of(sh(&script))).await.unwrap();
    let (mut count, mut most) = (0_u64, 0);
    let exit = loop {
        match within(call.output.message()).await.unwrap().unwrap().m.unwrap() {
            exec_out::M::Stdout(chunk) => {
                assert!(chunk.data.len() <= CHUNK_OUT);
                let odd = count % 2 == 1;
                let right =
                    |(place, byte): (usize, &u8)| *byte == if (place % 2 == 1) ^ odd { b'\n' } else { b'y' };
                assert!(chunk.data.iter().enumerate().all(right), "altered");
                count += u64::try_from(chunk.data.len()).unwrap();
                most = most.max(resident());
            }
            exec_out::M::Exit(exit) => break exit,
            other @ (exec_out::M::Started(_) | exec_out::M::Stderr(_)) => panic!("out of order: {other:?}"),
        }
    };
    assert_eq!((count, exit.stdout_bytes), (BYTES, BYTES));
    let grown = most.saturating_sub(before);
    assert!(grown < 64 * 1024 * 1024, "grew by {grown}");
    guest.end().await;
}

#[tokio::test]
async fn slow_reader_blocks_the_program() {
    const BYTES: usize = 8 * 1024 * 1024;
    let guest = Guest::start();
    let script = format!("exec head -c {BYTES} /dev/zero");
    let call = guest.begin(of(sh(&script))).await.unwrap();
    let proc = format!("/proc/{}", call.started.pid);
    let written = || {
        let io = std::fs::read_to_string(format!("{proc}/io")).unwrap();
        let line = io.lines().find_map(|line| line.strip_prefix("wchar: "));
        line.unwrap().parse::<usize>().unwrap()
    };
    // Nobody reads: it comes to rest in a write, long before it is through.
    eventually("the program waits in a write", || {
        let syscall = std::fs::read_to_string(format!("{proc}/syscall")).unwrap();
        syscall.starts_with("1 0x1 ")
    })
    .await;
    let at_rest = written();
    assert!(at_rest < 1024 * 1024, "{at_rest} bytes were taken from it");
    // Another call does not notice.
    assert_eq!(guest.run(sh("exit 4")).await.unwrap().code(), 4);
    let ran = call.finish().await.unwrap();
    assert_eq!((ran.code(), ran.stdout.len()), (0, BYTES));
    guest.end().await;
}

#[tokio::test]
async fn a_signal_gets_through_to_who_is_not_read() {
    let guest = Guest::start();
    let call = guest.begin(of(command(&[b"yes"]))).await.unwrap();
    let handle = super::harness::handle(i32::try_from(call.started.pid).unwrap());
    call.send(M::Signal(sandbox_protocol::v1::Signal { number: 15, scope: 0 }))
        .await;
    super::harness::death(handle).await;
    assert_eq!(call.finish().await.unwrap().signal(), 15);
    guest.end().await;
}

#[tokio::test]
async fn last_bytes_before_exit_arrive() {
    let guest = Guest::start();
    // A burst of what a pipe holds, and gone: everything is in the pipe when the exit is known.
    for _ in 0..60 {
        let ran = guest
            .run(sh("head -c 65536 /dev/zero; echo error >&2"))
            .await
            .unwrap();
        assert_eq!((ran.stdout.len(), &*ran.stderr), (65_536, &b"error\n"[..]));
    }
    guest.end().await;
}

#[tokio::test]
async fn merged_output_keeps_order() {
    let guest = Guest::start();
    let mut wanted = sh("i=0; while [ $i -lt 5000 ]; do echo o$i; echo e$i >&2; i=$((i+1)); done");
    wanted.merge_output = true;
    let ran = guest.run(wanted).await.unwrap();
    let expected: String = (0..5000).map(|i| format!("o{i}\ne{i}\n")).collect();
    assert!(ran.text() == expected && ran.stderr.is_empty());
    guest.end().await;
}

#[tokio::test]
async fn the_work_of_an_exec_is_counted() {
    let guest = Guest::start();
    let traced = |stdin| ExecStart {
        trace: true,
        stdin,
        ..of(sh("cat; echo x"))
    };
    let work = guest.run_start(traced(false)).await.unwrap().exit.work.unwrap();
    assert_eq!(
        (work.clones, work.leaves_taken, work.rings_built, work.writes),
        (1, 1, 0, 0)
    );
    assert!(
        work.reads >= 1 && work.run_us > 0 && work.start_us > 0,
        "{work:?}"
    );
    let mut call = guest.begin(traced(true)).await.unwrap();
    call.send(M::Stdin(Bytes::from_static(b"x"))).await;
    call.input = None;
    let work = call.finish().await.unwrap().exit.work.unwrap();
    assert_eq!((work.tasks_spawned, work.writes), (1, 1));
    assert_eq!(guest.run(sh("true")).await.unwrap().exit.work, None);
    guest.end().await;
}

#[tokio::test]
async fn a_call_that_is_all_there_at_the_start_closes_stdin() {
    let guest = Guest::start();
    for _ in 0..20 {
        let first = ExecIn {
            m: Some(M::Start(with_stdin(command(&[b"cat"])))),
        };
        let mut client = guest.client.clone();
        let call = Box::pin(client.exec(futures_util::stream::iter([first])));
        let mut output = within(call).await.unwrap().into_inner();
        let mut last = None;
        while let Some(message) = within(output.message()).await.unwrap() {
            last = message.m;
        }
        assert!(matches!(last, Some(exec_out::M::Exit(_))), "{last:?}");
    }
    guest.end().await;
}
