use super::*;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Instant;

#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn serial(output: impl Write + Send + 'static) -> (Serial, EventFd) {
    let irq = EventFd::new(EFD_NONBLOCK).unwrap();
    let port = Serial::new(irq.try_clone().unwrap(), Box::new(output)).unwrap();
    (port, irq)
}

fn read(port: &Serial, register: u8) -> u8 {
    let mut value = [0];
    port.read(u64::from(register), &mut value);
    value[0]
}

fn write(port: &Serial, register: u8, value: u8) {
    port.write(u64::from(register), &[value]);
}

/// What an interrupt handler reads: everything that is there.
fn drain_fifo(port: &Serial) -> Vec<u8> {
    let mut bytes = Vec::new();
    while read(port, LSR) & 1 != 0 {
        bytes.push(read(port, DATA));
    }
    bytes
}

#[test]
fn output_reaches_the_writer_in_order() {
    let screen = Screen::default();
    let (port, irq) = serial(screen.clone());
    let text: Vec<u8> = (0..10_000u32).map(|i| i as u8).collect();
    for &byte in &text {
        write(&port, DATA, byte);
    }
    assert!(port.drain(Duration::from_secs(30)));
    assert_eq!(*screen.0.lock().unwrap(), text);
    assert!(irq.read().is_err(), "no interrupt was enabled");
}

#[test]
fn transmitter_empty_interrupt_when_enabled() {
    let (port, irq) = serial(io::sink());
    write(&port, IER, 1 << 1);
    assert_eq!(irq.read().unwrap(), 1);
    assert_eq!(read(&port, 2) & 0xf, 2, "IIR names the transmitter");
    write(&port, DATA, b'x');
    assert_eq!(irq.read().unwrap(), 1);
}

#[test]
fn a_large_paste_arrives_whole() {
    let (port, irq) = serial(io::sink());
    let paste: Vec<u8> = (0..5000u32).map(|i| (i * 7) as u8).collect();
    let mut offered = 0;
    let mut received = Vec::new();
    // Before the driver opens the port nothing is taken, so its start-up flush loses nothing.
    assert_eq!(port.input(&paste), 0);
    for _ in 0..3 {
        read(&port, LSR);
        read(&port, DATA);
    }
    assert!(port.input_room().read().is_err());
    write(&port, IER, IER_RECEIVED);
    assert_eq!(port.input_room().read().unwrap(), 1);
    while received.len() < paste.len() {
        offered += port.input(&paste[offered..]);
        assert_eq!(irq.read().unwrap(), 1);
        received.extend(drain_fifo(&port));
        if offered < paste.len() {
            assert_eq!(port.input_room().read().unwrap(), 1, "at {offered}");
        }
    }
    assert_eq!(received, paste);
    assert!(port.input_room().read().is_err());
}

#[test]
fn input_while_the_driver_masks_its_interrupts_comes_afterwards() {
    let (port, irq) = serial(io::sink());
    write(&port, IER, IER_RECEIVED);
    // The kernel's console masks interrupts while it writes a line.
    write(&port, IER, 0);
    assert_eq!(port.input(b"ls\n"), 0);
    write(&port, DATA, b'#');
    assert!(irq.read().is_err());
    write(&port, IER, IER_RECEIVED);
    assert_eq!(port.input_room().read().unwrap(), 1);
    assert_eq!(port.input(b"ls\n"), 3);
    assert_eq!(irq.read().unwrap(), 1);
    assert_eq!(drain_fifo(&port), b"ls\n");
}

#[test]
fn a_driver_that_polls_gets_input_without_interrupts() {
    let (port, _irq) = serial(io::sink());
    let text: Vec<u8> = (0..200u8).collect();
    let mut offered = port.input(&text);
    assert_eq!(offered, 0);
    let mut received = Vec::new();
    for _ in 0..2000 {
        if port.input_room().read().is_ok() {
            offered += port.input(&text[offered..]);
        }
        if read(&port, LSR) & 1 != 0 {
            received.push(read(&port, DATA));
        }
    }
    assert_eq!(received, text);
}

#[test]
fn loop_mode_takes_no_input() {
    let (port, _irq) = serial(io::sink());
    write(&port, IER, IER_RECEIVED);
    write(&port, MCR, MCR_LOOP);
    assert_eq!(port.input(b"a"), 0);
    write(&port, DATA, b'z');
    assert_eq!(drain_fifo(&port), b"z");
    write(&port, MCR, 0);
    assert_eq!(port.input_room().read().unwrap(), 1);
    assert_eq!(port.input(b"a"), 1);
}

/// Blocks in its first write until told to go on.
struct Stuck(mpsc::Receiver<()>, Screen);

impl Write for Stuck {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.0.recv();
        self.1.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_stuck_terminal_does_not_hold_the_vcpu_for_ever() {
    let (release, wait) = mpsc::channel();
    let screen = Screen::default();
    let (port, _irq) = serial(Stuck(wait, screen.clone()));
    let begin = Instant::now();
    // More than the buffer holds, while nothing is written.
    for _ in 0..600_000 {
        write(&port, DATA, b'.');
    }
    assert!(begin.elapsed() < Duration::from_secs(60));
    assert!(!port.drain(Duration::from_millis(1)));
    drop(release);
    assert!(port.drain(Duration::from_secs(30)));
    let written = screen.0.lock().unwrap().len();
    assert!((1..600_000).contains(&written), "{written}");
    // It works again afterwards.
    write(&port, DATA, b'!');
    assert!(port.drain(Duration::from_secs(30)));
    assert_eq!(screen.0.lock().unwrap().last(), Some(&b'!'));
}

#[test]
fn a_closed_pipe_drops_output_and_goes_on() {
    struct Broken;
    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (port, _irq) = serial(Broken);
    for _ in 0..1000 {
        write(&port, DATA, b'x');
    }
    assert!(port.drain(Duration::from_secs(30)));
    assert_eq!(read(&port, LSR) & 0x60, 0x60, "the port still answers");
}

#[test]
fn a_non_blocking_sink_is_tried_again() {
    struct Shy(u32, Screen);
    impl Write for Shy {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += 1;
            match self.0 % 3 {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                1 => Err(io::ErrorKind::Interrupted.into()),
                _ => self.1.write(&bytes[..1]),
            }
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let screen = Screen::default();
    let (port, _irq) = serial(Shy(0, screen.clone()));
    for &byte in b"hello, world" {
        write(&port, DATA, byte);
    }
    assert!(port.drain(Duration::from_secs(30)));
    assert_eq!(*screen.0.lock().unwrap(), b"hello, world");
}
