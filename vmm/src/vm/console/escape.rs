//! The keys that a terminal's user has for the VMM itself: Ctrl-A and one more, as in QEMU.

/// What a key means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// It goes to the guest.
    Guest(u8),
    /// It begins a command.
    Held,
    /// End the run.
    Leave,
    /// Tell the keys.
    Help,
}

/// The commands, told on request.
pub const HELP: &str = "\r\nCtrl-A x    end the virtual machine\r\nCtrl-A Ctrl-A    send Ctrl-A\r\nCtrl-A h    this list\r\n";

const PREFIX: u8 = 0x01;

/// Whether the prefix was typed.
#[derive(Debug, Default)]
pub struct Escape {
    held: bool,
}

impl Escape {
    /// Takes the next key.
    pub fn key(&mut self, byte: u8) -> Key {
        if !std::mem::take(&mut self.held) {
            if byte == PREFIX {
                self.held = true;
                return Key::Held;
            }
            return Key::Guest(byte);
        }
        match byte {
            b'x' | b'X' => Key::Leave,
            b'h' | b'?' => Key::Help,
            PREFIX | b'a' => Key::Guest(PREFIX),
            // Not a command: the prefix was a slip.
            other => Key::Guest(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_then_command() {
        let mut escape = Escape::default();
        let keys: Vec<Key> = b"a\x01x\x01\x01\x01q\x01h"
            .iter()
            .map(|b| escape.key(*b))
            .collect();
        let expected = [
            Key::Guest(b'a'),
            Key::Held,
            Key::Leave,
            Key::Held,
            Key::Guest(1),
            Key::Held,
            Key::Guest(b'q'),
            Key::Held,
            Key::Help,
        ];
        assert_eq!(keys, expected);
    }
}
