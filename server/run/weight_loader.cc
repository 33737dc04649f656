#include "server/run/weight_loader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

absl::Status Over() { return absl::AbortedError("this LoadState is over"); }

}  // namespace

WeightLoader::WeightLoader(Environment environment) : environment_(std::move(environment)) {
  needs_.weights.assign(environment_.spec->tensors.size(), true);
  needs_.state.assign(environment_.spec->tensors.size(), false);
}

absl::Status WeightLoader::Check(SessionId session) const {
  return environment_.driver->machine().CheckCurrent(session);
}

absl::Status WeightLoader::CheckMoment(bool replaces) const {
  const StepMachine& machine = environment_.driver->machine();
  const std::string& run = environment_.spec->run_id;
  if (environment_.driver->executor().gate().replacing() && !replaces_) {
    return absl::UnavailableError(absl::StrCat("run '", run, "' is being amended (AmendRun); ask again"));
  }
  if (!replaces && (machine.step_open() || environment_.driver->executor().last_result())) {
    return absl::FailedPreconditionError(absl::StrCat("LoadState is for before the first step; run '", run,
                                                      "' is at step ", machine.step(),
                                                      ". To replace what it has, set LoadStateRequest.replace"));
  }
  if (replaces && machine.step_open()) {
    return absl::FailedPreconditionError(
        absl::StrCat("LoadState with replace is for between two steps, and step ", machine.step(), " of run '", run,
                     "' is open: call it when every rank has the step's result, and before any begins the next"));
  }
  return absl::OkStatus();
}

void WeightLoader::Begin(LoadCall call, bool replaces, Done done) {
  if (auto s = Check(call.session); !s.ok()) return done(s);
  if (auto s = CheckMoment(replaces); !s.ok()) return done(s);
  // One that is under way is over: its client may have lost the connection, and know that before the daemon does.
  if (!replaces || !replaces_) Leave();
  call_ = call;
  if (replaces_) {
    load_ = std::make_shared<LoadJob>(environment_.spec, environment_.store, &needs_);
    return done(absl::OkStatus());
  }
  if (!replaces) {
    needs_.weights.assign(needs_.weights.size(), true);
    needs_.state.assign(needs_.state.size(), false);
    load_ = std::make_shared<LoadJob>(environment_.spec, environment_.store, &needs_);
    if (loaded_) EndReaders();
    Show(false);  // until all of it is in
    return done(environment_.store->ForgetLoadedState());
  }
  environment_.driver->WhenQuiet([this, call, done = std::move(done)](absl::Status s) mutable {
    if (s.ok() && call_ != call) s = Over();
    if (s.ok()) s = Check(call.session);
    if (s.ok()) s = CheckMoment(/*replaces=*/true);
    if (s.ok()) BeginReplacement();
    done(std::move(s));
  });
}

void WeightLoader::BeginReplacement() {
  replaces_ = true;
  load_ = std::make_shared<LoadJob>(environment_.spec, environment_.store, &needs_);
  environment_.driver->BeginReplacement();
  Show(false);
  EndReaders();
}

void WeightLoader::EndReaders() {
  environment_.end_readers(absl::UnavailableError(
      absl::StrCat("the weights of run '", environment_.spec->run_id, "' are being replaced (LoadState); pull again")));
}

void WeightLoader::Load(LoadCall call, std::vector<LoadChunk> chunks, Done done) {
  if (auto s = Check(call.session); !s.ok()) return done(s);
  if (!IsCurrent(call)) return done(Over());
  load_->Load(std::move(chunks), std::move(done));
}

void WeightLoader::Finish(LoadCall call, DigestJob::Done done) {
  if (auto s = Check(call.session); !s.ok()) return done(s);
  if (!IsCurrent(call)) return done(Over());
  if (auto s = load_->Finish(); !s.ok()) {
    Leave();
    return done(s);
  }
  load_.reset();
  const bool replaced = std::exchange(replaces_, false);
  needs_.weights.assign(needs_.weights.size(), false);
  needs_.state.assign(needs_.state.size(), false);
  by_ = call.session;
  environment_.driver->set_lacks_added("");
  Show(true);
  if (replaced) environment_.driver->EndReplacement(/*whole=*/true);
  environment_.digests->Start(std::move(done));
}

void WeightLoader::Abandon(LoadCall call) {
  if (call_ == call) Leave();
}

void WeightLoader::Leave() {
  call_ = {};
  load_.reset();
  if (!std::exchange(replaces_, false)) return;
  Show(!lacks_any());
  environment_.driver->EndReplacement(/*whole=*/false);
}

void WeightLoader::End(const absl::Status& why) {
  if (load_ != nullptr) load_->Abandon(why);
}

void WeightLoader::GoOnFrom(uint32_t kept) {
  const auto tensors = static_cast<uint32_t>(needs_.weights.size());
  std::fill_n(needs_.weights.begin(), kept, false);
  if (kept < tensors) {
    environment_.driver->set_lacks_added(absl::StrCat(
        "AmendRun has added ", tensors - kept, " tensors, from '", environment_.spec->tensors[kept].name,
        "' on, that have no weights yet: send them with LoadState (LoadStateRequest.replace) before the next step"));
  }
  Show(kept == tensors);
}

void WeightLoader::OnRewound() {
  if (loaded_) return;
  needs_.weights.assign(needs_.weights.size(), false);
  needs_.state.assign(needs_.state.size(), false);
  Leave();
  Show(true);
}

bool WeightLoader::lacks_any() const {
  const auto any = [](const std::vector<bool>& of) { return std::find(of.begin(), of.end(), true) != of.end(); };
  return any(needs_.weights) || any(needs_.state);
}

absl::Status WeightLoader::CheckRead() const {
  const std::string& run = environment_.spec->run_id;
  if (loaded_) return absl::OkStatus();
  if (replaces_) {
    return absl::UnavailableError(absl::StrCat("the weights of run '", run, "' are being replaced (LoadState)"));
  }
  const StepGate& gate = environment_.driver->executor().gate();
  if (environment_.driver->executor().last_result() || gate.lacks_added()) return gate.lacking();
  return absl::FailedPreconditionError(
      absl::StrCat("run '", run, "' has no weights yet; a trainer sends them with LoadState"));
}

void WeightLoader::Show(bool loaded) {
  loaded_ = loaded;
  environment_.driver->set_weights_loaded(loaded);
  environment_.board->Write([&](RunStatus& s) { s.weights_loaded = loaded; });
}

}  // namespace ballast
