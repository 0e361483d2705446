//! Whole attempts, report by report: what is done, and what stands in the history.

mod repeats;

use baton_protocol::ids::Incarnation;
use baton_protocol::lifecycle::Plan;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::lifecycle::State;
use baton_protocol::wire::{decode_event, prefill_event};

use super::*;
use crate::dispatch::progress::StateDetail;

const PROMPT: u32 = 40;

struct Bench {
    attempt: Attempt,
    progress: Progress,
    now: Moment,
}

fn party(worker: &str) -> Party {
    Party {
        worker: worker.into(),
        incarnation: Incarnation(1),
        domain: "h".to_owned(),
        operation: format!("r/1/{worker}").into(),
    }
}

impl Bench {
    fn new(plan: Plan) -> Self {
        let now = Moment(1_000_000);
        let mut progress = Progress::new(PROMPT, now);
        progress.begin(plan, now, StateDetail::default());
        let task = match plan {
            Plan::Local => Task::Whole { worker: party("d") },
            Plan::Remote => Task::Split {
                prefill: party("p"),
                decode: party("d"),
                first_token_by_prefill: true,
            },
        };
        let limits = Limits::from(&Timeouts::default());
        Self {
            attempt: Attempt::new(task, limits, 16, now),
            progress,
            now,
        }
    }

    /// A remote attempt whose lease is open and whose first token is out.
    fn handed() -> Self {
        let mut bench = Self::new(Plan::Remote);
        bench.decode(reserved(16));
        bench.prefill(lease());
        bench.prefill(started());
        bench.prefill(prefill_event::Event::FirstToken(token(7, PROMPT)));
        bench.commands();
        bench
    }

    fn decode(&mut self, event: decode_event::Event) -> Vec<Command> {
        self.now.0 += 1_000;
        self.attempt.on_decode(event, self.now, &mut self.progress);
        self.commands()
    }

    fn prefill(&mut self, event: prefill_event::Event) -> Vec<Command> {
        self.now.0 += 1_000;
        self.attempt.on_prefill(event, self.now, &mut self.progress);
        self.commands()
    }

    fn commands(&mut self) -> Vec<Command> {
        std::iter::from_fn(|| self.attempt.next_command()).collect()
    }

    fn states(&self) -> Vec<State> {
        self.progress
            .history()
            .iter()
            .map(|event| event.state)
            .collect()
    }

    fn wait_until_late(&mut self) -> Vec<Command> {
        self.now = self.attempt.deadline().expect("something is waited for");
        self.attempt.on_timer(self.now, &mut self.progress);
        self.commands()
    }
}

fn token(id: u32, position: u32) -> wire::Token {
    wire::Token {
        id,
        position,
        logprobs: None,
        finish: None,
    }
}

fn decoded(id: u32, position: u32) -> decode_event::Event {
    decode_event::Event::Token(token(id, position))
}

fn reserved(cached_tokens: u32) -> decode_event::Event {
    decode_event::Event::Reserved(wire::Admission {
        load_sequence: 3,
        cached_tokens,
        blocks: 4,
    })
}

fn lease() -> prefill_event::Event {
    prefill_event::Event::Lease(wire::LeaseOpened {
        descriptor: Some(wire::Descriptor {
            generation: 9,
            ..wire::Descriptor::default()
        }),
        admission: Some(wire::Admission::default()),
    })
}

fn sealed() -> prefill_event::Event {
    prefill_event::Event::Sealed(wire::Sealed {
        blocks: 2,
        compute_milliseconds: 5.0,
        ..wire::Sealed::default()
    })
}

fn failed_transfer(cause: HandoffFailure) -> decode_event::Event {
    decode_event::Event::TransferFailed(wire::TransferFailed {
        cause: cause.word().to_owned(),
        message: "m".to_owned(),
        verified_blocks: 1,
        left: Vec::new(),
    })
}

fn started() -> prefill_event::Event {
    prefill_event::Event::Started(wire::Started::default())
}

fn finished() -> decode_event::Event {
    decode_event::Event::Finished(wire::Finished {
        reason: wire::FinishReason::Length.into(),
        ..wire::Finished::default()
    })
}

fn failure(commands: &[Command]) -> &Failure {
    match commands.last() {
        Some(Command::End(End::Failed(failure)) | Command::HandoffFailed(failure)) => failure,
        other => panic!("no failure: {other:?}"),
    }
}

#[test]
fn a_remote_attempt_passes_all_ten_states_with_the_first_token_from_prefill() {
    let mut bench = Bench::new(Plan::Remote);
    let commands = bench.decode(reserved(16));
    assert!(
        commands.contains(&Command::OpenPrefill { skip_blocks: 1 }),
        "{commands:?}"
    );
    let commands = bench.prefill(lease());
    assert!(
        matches!(commands.last(), Some(Command::ToDecode(decode_request::Message::Descriptor(descriptor))) if descriptor.generation == 9)
    );
    bench.prefill(started());
    bench.decode(decode_event::Event::TransferStarted(
        wire::TransferStarted::default(),
    ));
    let commands = bench.prefill(prefill_event::Event::FirstToken(token(7, PROMPT)));
    assert_eq!(
        commands,
        [
            Command::Deliver(token(7, PROMPT)),
            Command::ToDecode(decode_request::Message::FirstToken(token(7, PROMPT))),
        ],
        "the client comes first"
    );
    bench.prefill(sealed());
    bench.decode(decode_event::Event::TransferCompleted(
        wire::TransferCompleted::default(),
    ));
    bench.decode(decode_event::Event::DecodeStarted(wire::Started::default()));
    bench.decode(decoded(8, PROMPT + 1));
    let commands = bench.decode(finished());
    let length = wire::FinishReason::Length;
    assert_eq!(
        commands,
        [
            Command::Answered(length),
            Command::End(End::Finished(length))
        ]
    );
    assert_eq!(
        bench.states(),
        [
            State::Accepted,
            State::RouteSelected,
            State::PrefillStarted,
            State::KvTransferStarted,
            State::PrefillCompleted,
            State::Streaming,
            State::KvPublished,
            State::KvTransferCompleted,
            State::DecodeStarted,
            State::Completed,
        ]
    );
    assert_eq!(
        bench.progress.illegal().len() + bench.progress.unresolved(),
        0
    );
    assert_eq!(bench.progress.sent(), [7, 8]);
}

#[test]
fn the_answer_does_not_wait_for_the_seal_but_the_record_does() {
    let mut bench = Bench::handed();
    let commands = bench.decode(finished());
    assert_eq!(
        commands,
        [Command::Answered(wire::FinishReason::Length)],
        "not over yet"
    );
    let commands = bench.prefill(sealed());
    assert_eq!(
        commands,
        [Command::End(End::Finished(wire::FinishReason::Length))]
    );
    let mut bench = Bench::handed();
    bench.decode(finished());
    let commands = bench.wait_until_late();
    assert_eq!(
        commands,
        [Command::End(End::Finished(wire::FinishReason::Length))],
        "a seal that never comes is not waited for"
    );
}

#[test]
fn a_failed_hand_off_is_recomputed_on_the_same_stream_and_goes_on_after_what_was_sent() {
    let mut bench = Bench::handed();
    let commands = bench.decode(failed_transfer(HandoffFailure::ChecksumMismatch));
    assert_eq!(failure(&commands).cause, "checksum-mismatch");
    bench.attempt.recompute(bench.now, &mut bench.progress);
    let commands = bench.commands();
    assert_eq!(
        commands,
        [
            Command::ToDecode(decode_request::Message::Recompute(
                wire::RecomputeLocally::default()
            )),
            Command::DropPrefill,
        ]
    );
    assert!(
        bench.prefill(sealed()).is_empty(),
        "the old source is not listened to"
    );
    bench.decode(decode_event::Event::PrefillStarted(wire::Started::default()));
    bench.decode(decode_event::Event::PrefillCompleted(
        wire::PrefillDone::default(),
    ));
    bench.decode(decode_event::Event::DecodeStarted(wire::Started::default()));
    assert_eq!(
        bench.decode(decoded(8, PROMPT + 1)),
        [Command::Deliver(token(8, PROMPT + 1))]
    );
    bench.decode(finished());
    assert_eq!(bench.progress.attempt(), 2);
    assert_eq!(bench.progress.illegal().len(), 0);
    assert_eq!(bench.states().last(), Some(&State::Completed));
}

#[test]
fn a_token_out_of_place_is_never_delivered() {
    for position in [PROMPT - 1, PROMPT, PROMPT + 2] {
        let mut bench = Bench::handed();
        bench.prefill(sealed());
        let commands = bench.decode(decoded(8, position));
        assert_eq!(failure(&commands).class, FailureClass::Bug, "{position}");
        assert_eq!(commands.len(), 1, "nothing else is done: {commands:?}");
        assert_eq!(bench.progress.sent(), [7]);
    }
}

#[test]
fn a_report_that_no_run_could_have_made_ends_the_run() {
    let mut bench = Bench::new(Plan::Local);
    bench.decode(reserved(0));
    let started = || decode_event::Event::PrefillStarted(wire::Started::default());
    bench.decode(started());
    let commands = bench.decode(started());
    assert_eq!(failure(&commands).class, FailureClass::Bug);
    assert!(failure(&commands).message.contains("happened already"));
    assert_eq!(bench.progress.illegal().len(), 1);
}

#[test]
fn an_end_before_anything_was_computed_is_no_answer() {
    let mut bench = Bench::new(Plan::Local);
    bench.decode(reserved(0));
    let commands = bench.decode(finished());
    assert_eq!(failure(&commands).class, FailureClass::Bug);
    assert_eq!(
        commands.len(),
        1,
        "the client is not told that it is complete"
    );
}

#[test]
fn what_is_still_said_of_a_hand_off_that_was_given_up_is_of_the_past() {
    let mut bench = Bench::handed();
    bench.prefill(sealed());
    assert_eq!(failure(&bench.wait_until_late()).cause, "timeout");
    bench.attempt.recompute(bench.now, &mut bench.progress);
    bench.commands();
    // The transfer was complete before the word to recompute arrived, and the worker goes on with it.
    for late in [
        decode_event::Event::TransferStarted(wire::TransferStarted::default()),
        decode_event::Event::TransferCompleted(wire::TransferCompleted::default()),
    ] {
        assert!(bench.decode(late).is_empty());
    }
    bench.decode(decode_event::Event::DecodeStarted(wire::Started::default()));
    let commands = bench.decode(decoded(8, PROMPT + 1));
    assert_eq!(commands, [Command::Deliver(token(8, PROMPT + 1))]);
    bench.decode(finished());
    assert_eq!(bench.states().last(), Some(&State::Completed));
    assert_eq!(bench.progress.illegal().len(), 0);
    let history = bench.progress.history();
    let inferred: Vec<State> = history
        .iter()
        .filter(|event| event.attempt == 2 && event.detail.inferred)
        .map(|event| event.state)
        .collect();
    assert_eq!(
        inferred,
        [
            State::RouteSelected,
            State::PrefillStarted,
            State::PrefillCompleted
        ]
    );
}

#[test]
fn a_transfer_that_goes_on_over_another_transport_has_begun_once() {
    let mut bench = Bench::handed();
    for transport in ["Shm", "Tcp"] {
        let commands = bench.decode(decode_event::Event::TransferStarted(
            wire::TransferStarted {
                transport: transport.to_owned(),
                generation: 9,
            },
        ));
        assert_eq!(commands, [Command::Transferring(transport.to_owned())]);
    }
    assert_eq!(bench.progress.actual.transport.as_deref(), Some("Tcp"));
    assert_eq!(bench.progress.illegal().len(), 0);
}

#[test]
fn a_source_that_is_lost_before_its_seal_fails_the_attempt_and_afterwards_does_not() {
    let mut bench = Bench::handed();
    bench
        .attempt
        .on_prefill_end("broken", bench.now, &mut bench.progress);
    let commands = bench.commands();
    assert_eq!(failure(&commands).class, FailureClass::PrefillLost);
    assert_eq!(failure(&commands).worker, Some("p".into()));

    let mut bench = Bench::handed();
    bench.prefill(sealed());
    bench
        .attempt
        .on_prefill_end("closed", bench.now, &mut bench.progress);
    assert!(bench.commands().is_empty());
}

#[test]
fn each_wait_ends_and_names_whom_it_waited_for() {
    let mut bench = Bench::new(Plan::Remote);
    let late = bench.wait_until_late();
    assert_eq!(failure(&late).class, FailureClass::DecodeLost);
    assert_eq!(failure(&late).worker, Some("d".into()));

    let mut bench = Bench::new(Plan::Remote);
    bench.decode(reserved(0));
    let late = bench.wait_until_late();
    assert_eq!(failure(&late).class, FailureClass::PrefillLost);
    assert_eq!(failure(&late).worker, Some("p".into()));

    let mut bench = Bench::handed();
    bench.prefill(sealed());
    let late = bench.wait_until_late();
    assert_eq!(failure(&late).cause, "timeout", "the transfer");

    let mut bench = Bench::new(Plan::Local);
    bench.decode(reserved(0));
    bench.decode(decode_event::Event::PrefillStarted(wire::Started::default()));
    bench.decode(decode_event::Event::PrefillCompleted(
        wire::PrefillDone::default(),
    ));
    bench.decode(decoded(1, PROMPT));
    let late = bench.wait_until_late();
    assert_eq!(failure(&late).class, FailureClass::DecodeLost);
    assert!(failure(&late).message.contains("next token"));
}

#[test]
fn a_refusal_has_the_class_that_the_table_gives_it() {
    for (reason, class) in [
        ("pool-full", FailureClass::NoWorker),
        ("identity-mismatch", FailureClass::Incompatible),
        ("too-long", FailureClass::BadRequest),
        ("a-word-of-tomorrow", FailureClass::NoWorker),
    ] {
        let mut bench = Bench::new(Plan::Local);
        let commands = bench.decode(decode_event::Event::Refused(wire::Refused {
            reason: reason.to_owned(),
            ..wire::Refused::default()
        }));
        assert_eq!(failure(&commands).class, class, "{reason}");
    }
}

#[test]
fn what_was_published_before_the_last_step_hides_behind_computing() {
    let mut bench = Bench::new(Plan::Remote);
    bench.decode(reserved(0));
    for blocks in [8, 16, 20] {
        bench.prefill(prefill_event::Event::Published(wire::BlocksPublished {
            blocks,
        }));
    }
    bench.prefill(prefill_event::Event::Sealed(wire::Sealed {
        blocks: 21,
        ..wire::Sealed::default()
    }));
    assert_eq!(bench.attempt.last_blocks(), 5);
}

#[test]
fn an_answer_may_overtake_all_that_the_prefill_worker_reports_after_its_lease() {
    let late = |bench: &mut Bench| {
        bench.decode(reserved(16));
        bench.prefill(lease());
        for event in [
            decode_event::Event::TransferStarted(wire::TransferStarted::default()),
            decode_event::Event::TransferCompleted(wire::TransferCompleted::default()),
            decode_event::Event::DecodeStarted(wire::Started::default()),
            decoded(7, PROMPT),
        ] {
            bench.decode(event);
        }
        let commands = bench.decode(finished());
        assert_eq!(commands, [Command::Answered(wire::FinishReason::Length)]);
    };
    let check = |bench: &Bench| {
        assert_eq!(bench.states().last(), Some(&State::Completed));
        assert!(bench.states().contains(&State::KvTransferCompleted));
        assert_eq!(
            bench.progress.illegal().len() + bench.progress.unresolved(),
            0
        );
    };
    // It says it after all.
    let mut bench = Bench::new(Plan::Remote);
    late(&mut bench);
    bench.prefill(started());
    bench.prefill(sealed());
    check(&bench);
    // It is not heard again.
    let mut bench = Bench::new(Plan::Remote);
    late(&mut bench);
    bench.wait_until_late();
    check(&bench);
}
