#include "server/run/run.h"

#include <algorithm>
#include <new>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

#include "server/base/clock.h"
#include "server/base/start_thread.h"
#include "server/base/status_macros.h"

namespace ballast {
namespace {

RunLabels Labels(const RunSpec& spec, const Plan& plan, const LayerGroups& layers) {
  const TensorSpec& tensor = spec.tensors[0];
  const kernels::Kernel& kernel = *spec.groups[tensor.group].kernel;
  return {.run_id = spec.run_id,
          .optimizer = kernel.rule,
          .master = kernel.master,
          .state = kernel.state,
          .serving = kernels::WireFormats()[static_cast<size_t>(tensor.serving_format)].name,
          .parameters = plan.parameters,
          .layers = layers.names(),
          .ranks = spec.ranks,
          .two_components = HasPairedMaster(spec),
          .rms_threshold = spec.spikes.rms_threshold,
          .durable = spec.checkpoints.has_value(),
          .followed = spec.follow.has_value()};
}

absl::Status Ended(const RunSpec& spec) {
  return absl::NotFoundError(absl::StrCat("run '", spec.run_id, "' was deleted"));
}

std::string ProductsOf(const RunSpec& spec, const std::vector<Device*>& devices) {
  return HasMatrices(spec) ? devices.front()->MatrixProducts().value_or("") : "";
}

}  // namespace

Run::Run(Options* options)
    : spec_(std::move(options->spec)),
      chunk_starts_(std::make_shared<const std::vector<uint64_t>>(ChunkStarts(spec_))),
      canonical_spec_(std::move(options->canonical_spec)),
      spec_sha256_(std::move(options->spec_sha256)),
      plan_(std::move(options->plan)),
      storage_(options->storage),
      devices_(DeviceLabels(options->devices)),
      products_(ProductsOf(spec_, options->devices)),
      layers_(TensorNames(spec_), spec_.layer_groups),
      kept_(options->past == nullptr ? 0 : static_cast<uint32_t>(options->past->spec_.tensors.size())),
      history_(options->past == nullptr ? std::make_shared<RunHistory>() : options->past->history_),
      strand_({.name = spec_.run_id, .tick_s = 0.25, .tick = [this] { Tick(); }, .after = [this] { Settle(); }}) {}

Run::~Run() { End(Ended(spec_)); }

absl::StatusOr<std::shared_ptr<Run>> Run::Create(Options options) {
  try {
    std::shared_ptr<Run> run(new Run(&options));
    absl::Status status;
    run->PostAndWait([&] { status = run->Allocate(options); });
    RETURN_IF_ERROR(status);
    return run;
  } catch (const NoThread& none) {
    return absl::ResourceExhaustedError(none.what());
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("the system refused memory for the run's tables");
  }
}

void Run::PostAndWait(absl::FunctionRef<void()> task) {
  absl::Notification done;
  Post([&] {
    task();
    done.Notify();
  });
  done.WaitForNotification();
}

absl::Status Run::Allocate(const Options& options) try {
  const std::vector<Device*>& devices = options.devices;
  const ParameterStore* const past_store = options.past == nullptr ? nullptr : options.past->store_.get();
  ASSIGN_OR_RETURN(store_,
                   ParameterStore::Create(
                       {.spec = &spec_, .plan = &plan_, .devices = devices, .strand = &strand_, .past = past_store}));
  std::vector<DeviceBuffer> pools(devices.size());
  for (size_t s = 0; s < devices.size(); ++s) {
    ASSIGN_OR_RETURN(pools[s], devices[s]->Allocate(plan_.shards[s].pool_bytes, Place::kHost));
  }
  ASSIGN_OR_RETURN(auto snapshots, SnapshotRing::Create(&spec_, store_.get()));
  RETURN_IF_ERROR(options.still_wanted());
  metrics_ = options.metrics->AddRun(Labels(spec_, plan_, layers_));
  AddFollowers();
  if (followers_ != nullptr && options.past == nullptr) followers_->weights().LoadTags();
  driver_ = std::make_unique<StepDriver>(StepExecutor::Environment{.spec = &spec_,
                                                                   .layers = &layers_,
                                                                   .store = store_.get(),
                                                                   .pools = std::move(pools),
                                                                   .snapshots = std::move(snapshots),
                                                                   .plan = &plan_,
                                                                   .metrics = metrics_.get(),
                                                                   .board = &board_,
                                                                   .history = history_.get(),
                                                                   .strand = &strand_,
                                                                   .storage = storage_,
                                                                   .canonical_spec = &canonical_spec_,
                                                                   .spec_sha256 = spec_sha256_,
                                                                   .products = products_,
                                                                   .followers = followers_.get()});
  digests_ = std::make_unique<DigestJob>(&spec_, store_.get(), plan_);
  pulls_ = std::make_unique<Pulls>(Pulls::Environment{
      .spec = &spec_, .store = store_.get(), .digests = digests_.get(), .source_of = [this](uint64_t step) {
        return driver_->executor().rewinder().SourceOf(step);
      }});
  loader_ = std::make_unique<WeightLoader>(
      WeightLoader::Environment{.spec = &spec_,
                                .store = store_.get(),
                                .driver = driver_.get(),
                                .digests = digests_.get(),
                                .board = &board_,
                                .end_readers = [this](const absl::Status& why) { EndReaders(why); }});
  unattended_since_s_ = MonotonicSeconds();
  board_.Write([&](RunStatus& s) {
    s.bytes = LiveBytes();
    s.unattended_since_s = unattended_since_s_;
    if (spec_.checkpoints) s.durability = Durability();
  });
  metrics_->OnState(NameOf(RunState::kWaiting));
  metrics_->OnRanks(0, spec_.ranks);
  return absl::OkStatus();
} catch (const NoThread& none) {
  return absl::ResourceExhaustedError(none.what());
} catch (const std::bad_alloc&) {
  return absl::ResourceExhaustedError("the system refused memory for the run's tables");
}

PlanBytes Run::LiveBytes() const {
  PlanBytes live = store_->bytes();
  const StepExecutor& executor = driver_->executor();
  live.gradients = executor.gradient_bytes();
  live.staging += executor.buffer_bytes() + digests_->scratch_bytes() + plan_.account_bytes + plan_.reader_bytes +
                  executor.journal_bytes();  // as it may come to be
  live.padding = plan_.bytes.padding;
  live.snapshots = executor.rewinder().bytes();
  live.client_state = executor.client_state_bytes();
  live.following = plan_.bytes.following;  // as it may come to be
  return live;
}

void Run::ShowState() {
  if (!failure_.ok()) return;  // shown as it is
  driver_->ShowState();
  const bool held = driver_->CountRanks().held > 0;
  if (held != unattended_since_s_.has_value()) return;
  unattended_since_s_ = held ? std::nullopt : std::optional(MonotonicSeconds());
  board_.Write([&](RunStatus& s) {
    s.unattended_since_s = unattended_since_s_;
    s.left_before_s.reset();
  });
}

void Run::Settle() {
  if (driver_ != nullptr) driver_->SettleIfDue();
}

void Run::Post(Strand::Task task) {
  strand_.Post([this, task = std::move(task)]() mutable {
    Settle();  // what came before comes first
    task();
  });
}

void Run::Tick() {
  if (driver_ != nullptr) {
    driver_->Tick();
    if (failure_.ok()) driver_->ShowAwaited();
    ShowState();
  }
  if (pulls_ != nullptr) pulls_->Tick(MonotonicSeconds());
  if (followers_ != nullptr) followers_->Tick(MonotonicSeconds());
}

void Run::Attach(AttachRequest request, AttachDone done) {
  Post([this, request = std::move(request), done = std::move(done)]() mutable {
    AttachOnStrand(request, std::move(done));
  });
}

void Run::AttachOnStrand(const AttachRequest& request, AttachDone done) {
  if (ended_ || closed_) return done(Gone(), 0);
  const auto outcome = driver_->Attach({.session = request.fresh,
                                        .resumes = request.resumes,
                                        .takeover = request.takeover,
                                        .rank = request.rank,
                                        .world = request.world,
                                        .coverage = request.coverage,
                                        .from_step = request.from_step,
                                        .again_step = request.again_step},
                                       request.peer);
  if (!outcome.status.ok()) return done(outcome.status, outcome.retry_after_s);
  request.accepted();
  ShowState();
  auto answer = ReplyTo(outcome, request.knows_whole);
  if (!answer.ok()) return done(answer.status(), 0);
  AttachReply reply = *std::move(answer);
  if (!request.want_digests || !loader_->loaded()) return done(std::move(reply), 0);
  digests_->Start([reply = std::move(reply), done = std::move(done)](absl::StatusOr<Digests> digests) mutable {
    if (!digests.ok()) return done(digests.status(), 0);
    reply.digests = *std::move(digests);
    done(std::move(reply), 0);
  });
}

absl::StatusOr<Run::AttachReply> Run::ReplyTo(const StepExecutor::AttachOutcome& outcome, bool knows_whole) const {
  const StepMachine& machine = driver_->machine();
  AttachReply reply{.session = outcome.session,
                    .resumed = outcome.resumed,
                    .resume_step = machine.step(),
                    .weights_loaded = loader_->loaded(),
                    .loaded_here = loader_->loaded_by(outcome.session),
                    .last_result = driver_->executor().last_result(),
                    .step_open = outcome.resumed && machine.InStep(outcome.rank),
                    .credit_held = outcome.resumed ? driver_->executor().held_bytes(outcome.rank) : 0,
                    .client_state = driver_->executor().client_state(outcome.rank),
                    .generation = machine.generation()};
  if (!reply.step_open) return reply;
  reply.applied = machine.TensorsApplied();
  const auto tensors = static_cast<uint32_t>(spec_.tensors.size());
  ASSIGN_OR_RETURN(reply.held, HeldOf(machine.reduction(), outcome.rank, tensors, knows_whole));
  return reply;
}

void Run::KeepAlive(SessionId session, absl::AnyInvocable<void(absl::Status)> done) {
  Post([this, session, done = std::move(done)]() mutable {
    if (ended_ || closed_) return done(Gone());
    const absl::Status heard = driver_->KeepAlive(session);
    ShowState();
    done(heard);
  });
}

void Run::OpenStream(std::shared_ptr<RankStream> stream, event::StreamOpened opened) {
  Post([this, stream = std::move(stream), opened = std::move(opened)] {
    if (ended_ || closed_) return stream->Finish(Gone());
    driver_->OpenStream(stream, opened);
  });
}

void Run::OnMessages(std::shared_ptr<RankStream> stream, std::vector<RankMessage> messages) {
  strand_.Post([this, stream = std::move(stream), messages = std::move(messages)]() mutable {
    if (!ended_) driver_->OnMessages(stream, std::move(messages));
  });
}

void Run::OnWritten(std::shared_ptr<RankStream> stream) {
  strand_.Post([this, stream = std::move(stream)] {
    if (!ended_) driver_->OnWritten(stream.get());
  });
}

void Run::OnRoom() {
  Post([this] {
    if (!ended_) driver_->OnRoom();
  });
}

void Run::OnInputClosed(std::shared_ptr<RankStream> stream) {
  Post([this, stream = std::move(stream)] {
    if (ended_) return;
    driver_->OnInputClosed(stream.get());
    ShowState();
  });
}

void Run::OnStreamGone(std::shared_ptr<RankStream> stream) {
  Post([this, stream = std::move(stream)] {
    if (ended_) return;
    driver_->OnStreamGone(stream.get());
    ShowState();
  });
}

void Run::Drain(std::function<void()> done) {
  Post([this, done = std::move(done)] {
    if (ended_ || !failure_.ok()) return done();
    driver_->Drain(done);
  });
}

void Run::AskStepOpen(std::function<void(bool)> done) {
  Post([this, done = std::move(done)] { done(!ended_ && failure_.ok() && driver_->machine().step_open()); });
}

void Run::Close(absl::AnyInvocable<void(absl::Status)> done) {
  Post([this, done = std::move(done)]() mutable {
    if (ended_) return done(Gone());
    const absl::Status status = Unattended();
    if (status.ok()) closed_ = true;
    done(status);
  });
}

void Run::CheckUnattended(absl::AnyInvocable<void(absl::Status)> done) {
  Post([this, done = std::move(done)]() mutable { done(ended_ ? Gone() : Unattended()); });
}

absl::Status Run::Unattended() const { return failure_.ok() ? driver_->CheckUnattended() : absl::OkStatus(); }

absl::Status Run::BeingAmended() const {
  return absl::UnavailableError(absl::StrCat("run '", spec_.run_id, "' is being amended (AmendRun); ask again"));
}

absl::Status Run::Gone() const { return gone_.ok() ? Ended(spec_) : gone_; }

void Run::Dismiss(const absl::Status& why) {
  driver_->End(why);
  if (digests_ != nullptr) digests_->Abandon(why);
  if (pulls_ != nullptr) pulls_->End(why);
  if (followers_ != nullptr) followers_->End(why);
  if (loader_ != nullptr) loader_->End(why);
  closed_ = true;
  gone_.Update(why);
}

void Run::Fail(absl::Status why) {
  Post([this, why = std::move(why)] {
    if (ended_ || !failure_.ok()) return;
    failure_ = why;
    // First what is asked for, then the streams: who is told of the failure finds it in the status.
    board_.Write([&](RunStatus& s) {
      s.state = RunState::kFailed;
      s.failure = std::string(why.message());
      s.ranks.clear();
      s.awaited.clear();
      if (!s.unattended_since_s) s.unattended_since_s = MonotonicSeconds();
    });
    metrics_->OnState(NameOf(RunState::kFailed));
    metrics_->OnRanks(0, spec_.ranks);
    Dismiss(why);
  });
}

uint64_t Run::End(absl::Status status) {
  uint64_t freed = 0;
  PostAndWait([&] {
    if (!ended_ && driver_ != nullptr) Dismiss(status);
  });
  EndWhenIdle(&freed);
  strand_.Stop();
  return freed;
}

std::unique_ptr<ParameterStore> Run::EndWhenIdle(uint64_t* freed) {
  std::unique_ptr<ParameterStore> store;
  // A completion may submit what follows: nothing is freed before the last.
  for (bool over = false; !over;) {
    if (store_ != nullptr) store_->WaitIdle();
    if (driver_ != nullptr && driver_->executor().checkpointer() != nullptr) {
      driver_->executor().checkpointer()->WaitWritten();
    }
    PostAndWait([&] {
      store = EndNow(freed);
      over = ended_;
    });
  }
  return store;
}

std::unique_ptr<ParameterStore> Run::EndNow(uint64_t* freed) {
  if (ended_ || (store_ != nullptr && store_->awaits_completions())) return nullptr;
  if (driver_ != nullptr && driver_->executor().checkpointer() != nullptr &&
      driver_->executor().checkpointer()->at_writer()) {
    return nullptr;
  }
  ended_ = true;
  *freed = board_.Read().bytes.total();
  pulls_.reset();
  loader_.reset();
  digests_.reset();
  driver_.reset();
  followers_.reset();
  if (metrics_ != nullptr) metrics_->OnRanks(0, spec_.ranks);
  if (amended_) metrics_->OnReplaced();
  return std::move(store_);
}

}  // namespace ballast
