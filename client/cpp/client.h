// ballast::Client: one trainer process's connection to a run.
//
//   std::vector<...> weights = ...;                 // what is bound outlives the client
//   auto client = ballast::Client::Connect({.server = "node7:7700"}).value();
//   client->CreateRun(spec);                        // ballast::v1::RunSpec; idempotent
//   auto attachment = client->Attach({.run_id = "r1"}).value();
//   if (!attachment.weights_loaded) client->LoadWeights(views);
//   for (uint32_t i = 0; i < tensors; ++i) client->BindWeights(i, pointer[i], bytes[i]);
//   for (...) {
//     client->BeginStep({.groups = {{.lr = 1e-3}}});
//     for (tensor in backward order) client->Push(tensor, gradient);   // copies, returns at once
//     auto result = client->EndStep(loss).get();                       // absl::StatusOr<StepResult>
//   }                                                                  // every bound weight is now in place
//
// Threads: the calls of one step, CreateRun, AmendRun and LoadWeights come from one thread at a time (thread-compatible), the
// others from any, also meanwhile; but nothing is called beside Attach and Detach. A reader and a writer thread of the client's
// own move the bytes, so the calls of a step do not wait for the daemon: but BeginStep, of a run on several, while one of them
// is away; and AwaitWeights, and the waits on the futures of MeasureStep and EndStep, for all ranks have to come so far. Detach
// and the destructor wait for 5 s at most. All other calls wait for the daemon's answer: Checkpoint, Restore and TagVersion for
// 2 hours, AmendRun for 30 minutes, Attach as its options say, Pull and LoadWeights while the daemon is there, the others for 2
// minutes. Debian's Abseil searches for deadlocks at every lock, which is felt with many small tensors: a program turns that
// off, for all that it does, by absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore).
//
// Callbacks may not throw, nor call or destroy the client. Those of a call come from one thread at a time, of several daemons
// not from the caller's.
//
// Forks: a fork of a process with a client has no part in it. Each call is FAILED_PRECONDITION there, as is Connect, and the
// client's end there touches nothing.
//
// A lost connection is resumed by itself for `reconnect_timeout_s`, sending again only what the daemon does not hold;
// then every call returns UNAVAILABLE naming the server. All other calls are tried again for as long, but for DeleteRun,
// Rewind and Restore, which are others the second time; they also ask a busy daemon again when it says. If
// there are several ranks, a step that closed meanwhile without this one has changed nothing here: the open step gets
// its result, and the next BeginStep begins the step that is next. When the run has given this rank up (lease and
// rank_timeout), calls return UNAVAILABLE too: another client attaches in its place.
//
// Memory: Push copies, over shared memory to where the daemon reads, as far as the rank's window goes; else into a host
// buffer, and each chunk is freed as the daemon acknowledges it: gradients that do not leave as fast as they are pushed
// are kept, as many as AttachOptions.gradient_buffer_bytes says; then Push waits. 64 MiB of the memory that chunks had stay
// for those to come, until the client is destroyed. What is passed to Push, LoadWeights and Pull is used in the course of
// the call alone. What is bound stays in use until it is bound elsewhere, Detach, or the client's end, also when a step has
// failed: make it before the client.
//
// Errors: absl::Status with the daemon's code and message. A call refused for its arguments or its place in the
// sequence (INVALID_ARGUMENT, FAILED_PRECONDITION) changes nothing. When the daemon ends the session, or cannot be
// reached again, the client stays failed and every call returns the same status; if it is one that RewoundTo
// (proto/rewound.h) knows, Attach may be called again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/rewound.h"

#include "ballast/v1/admin.pb.h"
#include "ballast/v1/run.pb.h"
#include "ballast/v1/trainer.pb.h"
#include "client/cpp/shard.h"

namespace ballast {

// Files in PEM, which may be replaced while the client lives: those that are there then hold for its next connection.
struct ClientTls {
  std::string ca;                // the authorities of which one has signed the daemon's certificate; empty: no TLS
  std::string certificate, key;  // the client's own, where the daemon wants one; nobody but its owner may read the key
  bool on() const { return !ca.empty() || !certificate.empty() || !key.empty(); }
};

struct ClientOptions {
  // host:port or unix:path. Several, with commas between them and in the same order for every rank: each daemon owns a
  // part of the run, whole tensors, and the client talks to all (proto/PROTOCOL.md, "Several daemons").
  std::string server = "localhost:7700";
  // With TLS the daemon's certificate must be for the server's host. FAILED_PRECONDITION of Connect: a file is not right.
  ClientTls tls = {};
  // The file of the token that the daemon's operator has given out (ballastctl token), which nobody else may read; it is
  // sent over TLS or a Unix socket alone. Empty: none.
  std::string token_file = {};
  double connect_timeout_s = 10;
  double reconnect_timeout_s = 15;
  // Gets the few lines that a person should see (connection lost, resumed, waiting for a lease), without a newline,
  // from any thread of the client. Empty: stderr.
  std::function<void(const std::string& line)> log = {};
  // A call that waits to try again asks this about ten times a second, on its own thread; true ends the call with the
  // error that it waited about. Empty: never.
  std::function<bool()> interrupted = {};
};

// What carries the step stream. kAuto: shared memory with a daemon on this host, otherwise gRPC. kShm: shared memory,
// or an error. kNccl: gRPC for messages, and NCCL for payloads, from AttachOptions::gpu to the daemon's; where that cannot be,
// or is lost before it has worked for a while, as kAuto, with a line that says why. Push may wait there for a GPU that takes
// nothing, half a minute.
enum class TransportChoice { kAuto, kGrpc, kShm, kNccl };

struct AttachOptions {
  std::string run_id;
  uint32_t rank = 0;
  uint32_t world = 1;     // at most the run's ranks; the same number on every rank
  bool takeover = false;  // fence a live session that holds the rank
  // How long to wait for a lost predecessor's lease to run out. Before that as long, but at most 10 s, for the daemon to notice that
  // a predecessor has ended that it takes for alive. 0: fail at once.
  double wait_s = 12;
  TransportChoice transport = TransportChoice::kAuto;
  // The GPU on which the trainer computes, torch's cuda:N of this process. Gradients that are pushed may lie in its memory, and
  // are complete then (what was to write them is done); so may weights that are bound, which nothing reads while they come.
  // Both go by the memory of the daemon's GPU where the transport is shared memory and this GPU reaches it, or NCCL; else
  // through host memory. NOT_FOUND, FAILED_PRECONDITION: there is no such GPU, or no fit driver; or for kNccl no fit
  // libnccl.so.2, of this process or else of the system.
  std::optional<int> gpu = {};
  // How much of a step's gradients may wait in host memory for the daemon to take it; beyond that Push waits, and keeps a chunk
  // more. It does not wait for ever, whatever the other ranks push first: not where the daemon asks for a gradient that is not
  // pushed yet; and where the daemon has taken nothing for gradient_wait_s, a line says so, and Push waits no more in this
  // session. On several daemons a share of the bytes for each.
  uint64_t gradient_buffer_bytes = uint64_t{1} << 30;
  double gradient_wait_s = 30;
  // How long to wait for the end of a step that is open without this rank, as long as the daemon answers.
  double join_timeout_s = 3600;
  // What this rank holds of the run's tensors, by tensor. All that it registers, pushes and gets back is of its shards
  // alone; what it does not contribute to counts as absent, and its weights come after EndStep, or MeasureStep, unless
  // the step has closed without this rank before. Together the ranks must contribute to every element, in a run that
  // takes the sum of gradients, or divides by the number of all ranks. LoadWeights stays of whole tensors.
  // INVALID_ARGUMENT: a shard that does not lie in its tensor, or one that would cut a chunk that is served with
  // scales; UNIMPLEMENTED: the daemon is older than this.
  Shards shards = {};
  // The spec that the caller goes by, as CreateRun or AmendRun answered it: FAILED_PRECONDITION if the run has another
  // one by now. Empty: the one of this client's own last CreateRun or AmendRun, if it was of this run.
  std::string spec_sha256 = {};
  // Of a part of a run: as in AttachRequest. For the client of the whole run.
  uint64_t from_step = 0, again_step = 0;
  // Likewise: whether Attach waits while a step is finished with what the rank's last process sent; else UNAVAILABLE.
  bool awaits_step = true;
};

// How long steps wait for ranks is part of the run, in v1::RunSpec: rank_timeout_s for a rank whose connection is lost,
// step_timeout_s for one that is silent, and on_lost_rank for what happens then.
//
// What Attach found. Digests are xxh3_64 of each tensor's bytes in its serving format (AttachResponse.digests says how
// scales are included); empty before weights are loaded.
struct Attachment {
  uint64_t resume_step = 1;  // the first step to send
  bool weights_loaded = false;
  std::vector<uint64_t> digests;
  std::optional<v1::StepResult> last_result;
  // The last StepEndValues::client_state that the rank sent with EndStep, and the step it sent it with; 0: none. If
  // that is not the step before resume_step, steps have closed without the rank.
  std::string client_state;
  uint64_t client_state_step = 0;
  uint64_t generation = 1;  // of the run: raised by a rewind, another world, and a replacement of weights
};

// A tensor's bytes in memory, row-major and contiguous: of the whole tensor.
struct TensorView {
  uint32_t tensor = 0;
  std::string format;  // fp32 | bf16 | fp16 | fp8-e5m2
  absl::Span<const std::byte> bytes;
  std::string slot = "weights";  // or momentum, variance: see v1::LoadStateRequest
  uint64_t updates = 0;          // of the slot "updates", which has neither format nor bytes
};

// Part of a tensor's weights as the daemon serves them: codes in the serving format, and for int8-row and int8-tensor
// the scales that they need, in order. A weight of int8 is code * scale / 127. Valid during the call that hands it out.
struct ServedPiece {
  uint32_t tensor = 0;
  uint64_t step = 0;   // that the weights are of
  uint64_t first = 0;  // element of the tensor
  std::string format;
  absl::Span<const std::byte> codes;
  absl::Span<const float> scales;  // of the rows that the codes have elements of, or the tensor's one
  std::string slot = "weights";    // or another of v1::PullRequest.slots, in fp32
  uint64_t updates = 0;            // of the slot "updates", which has neither format nor codes
};

// One group's hyperparameters for this step; those left out keep the spec's values.
struct GroupValues {
  std::optional<double> lr = {}, weight_decay = {}, beta1 = {}, beta2 = {}, momentum = {};
};
struct StepValues {
  std::vector<GroupValues> groups = {};  // by group index; may be shorter
  double loss_scale = 1;
  // At most the run's accumulation; the same number on every rank. EndMicro may end a step with fewer. 0, in a staged
  // run: not known yet; the micro-batch in which MeasureStep or EndStep is called is the last.
  uint32_t micro_batches = 1;
};
// What a rank sends with the end of a step.
struct StepEndValues {
  // The trainer's own state, such as that of its data loader and LR scheduler. The process that attaches to this rank
  // next gets it. Empty: what was sent last stays.
  std::string client_state = {};
  // In a staged run, values that replace those of BeginStep; the same on every rank.
  std::vector<GroupValues> groups = {};
  // In a staged run, this step's clipping, in place of the run's: above 0, finite; the same on every rank.
  std::optional<double> max_grad_norm = {};
  // In a staged run: the step comes to nothing, whatever the other ranks say. It closes SKIPPED, "discarded", when all
  // have ended it. May be said in any micro-batch; what was pushed and not sent is dropped.
  bool discard = false;
  // What the gradients' conversion to what they are sent in has cost, where that was counted: shares, from 0 to 1, of the
  // elements that were not 0 and became so, and that were finite and became infinite. For metrics.
  std::optional<double> gradient_flushed = {}, gradient_overflowed = {};
  // Of a part of a run: StepEnd.whole, .checkpoint and .kept_step. For the client of the whole run.
  std::optional<v1::WholeMeasure> whole = {};
  bool checkpoint = false;
  uint64_t kept_step = 0;
};
constexpr uint64_t kMostClientStateBytes = 1 << 20;

// What the whole step measures, over all tensors and ranks, after unscaling and before clipping: what the step's result
// will say, to the bit.
struct MeasuredStep {
  double grad_norm = 0;
  uint64_t nonfinite_tensors = 0;
  // False: the step comes to nothing and was not measured, since a rank discards it or it has closed; grad_norm is NaN.
  // EndStep tells why.
  bool measured = true;
  // Of a part of a run: StepMeasured.squares and .first_nonfinite. For the client of the whole run.
  std::vector<double> squares = {};
  std::optional<uint32_t> first_nonfinite = {};
  bool applied = false;  // likewise: not measured, since it has closed as applied
};

// How many bytes moved in one step, and how long it took.
struct StepTiming {
  uint64_t pushed_bytes = 0, pulled_bytes = 0;
  uint64_t pushed_bytes_in_backward = 0;  // sent before MeasureStep or EndStep was called
  uint64_t pulled_bytes_in_backward = 0;  // received before that
  uint64_t buffered_bytes_most = 0;       // of gradients, in the client's own memory at one time
  double backward_s = 0;                  // BeginStep to MeasureStep or EndStep
  double wait_s = 0;                      // EndStep to its result
};

// `result` is the same on every rank. SKIPPED and ABORTED: no weight changed, and none was received.
struct StepResult {
  v1::StepResult result;
  StepTiming timing;
  std::vector<uint32_t> received;  // tensors whose weights came, ascending; also those that only other ranks pushed
};

class Client {
 public:
  static absl::StatusOr<std::unique_ptr<Client>> Connect(ClientOptions options);
  virtual ~Client() = default;  // releases the rank, after a step that was ended; blocks for 5 s at most
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  virtual const std::string& server() const = 0;

  virtual absl::StatusOr<v1::CreateRunResponse> CreateRun(const v1::RunSpec& spec) = 0;
  virtual absl::StatusOr<v1::GetServerResponse> GetServer() = 0;
  virtual absl::StatusOr<v1::ListRunsResponse> ListRuns() = 0;
  virtual absl::StatusOr<v1::GetRunResponse> GetRun(const std::string& run_id) = 0;
  // The newest `most` of a run's steps after `after_step`; most = 0: all that are kept.
  virtual absl::StatusOr<v1::GetHistoryResponse> GetHistory(const std::string& run_id, uint64_t after_step = 0,
                                                            uint32_t most = 0) = 0;
  // keep_checkpoints: those on the daemon's disk stay, and Restore brings the run back; otherwise they go with it.
  // FAILED_PRECONDITION without `force`: a trainer is attached, or may come back after a rewind; or the run is on more
  // daemons than this client.
  virtual absl::StatusOr<v1::DeleteRunResponse> DeleteRun(const std::string& run_id, bool force,
                                                          bool keep_checkpoints = false) = 0;
  virtual absl::StatusOr<v1::RunPlan> Plan(const v1::RunSpec& spec) = 0;
  // Gives the attached run another spec, between two steps: its tensors first, in their order, and new ones after them;
  // other groups, hyperparameters, accumulation, max_grad_norm, checkpoint, follow. What stays keeps its state to the bit.
  // Waits until every connected rank has the last step's result. Then every session has ended as by a rewind to the
  // last step, also this one's: Attach again, bind weights anew, and send those of the tensors that were added with
  // LoadWeights and `replace`. Where the run has this spec already nothing changes, and `amended` is false: so the call
  // may be made again, also when its session has ended by it and the answer was lost. Refused, and the run goes on as
  // it was: INVALID_ARGUMENT names what may not change, FAILED_PRECONDITION says that a step is open,
  // RESOURCE_EXHAUSTED what memory is needed and free; UNIMPLEMENTED: the daemon is older than this.
  virtual absl::StatusOr<v1::AmendRunResponse> AmendRun(const v1::RunSpec& spec) = 0;
  // Takes a run back to a snapshot. Every session ends, also one of this client, which has ended when this returns.
  virtual absl::StatusOr<v1::RewindResponse> Rewind(const v1::RewindRequest& request) = 0;

  // Has the daemon write the run's last closed step to its disk, and waits until it is there for good: a crash of the
  // daemon, or of its machine, does not undo it. Where it is there already, the answer comes at once. A rank calls it
  // between two of its steps, any of them alone or all; who calls it with a step open that has updated something waits
  // for that step's end. FAILED_PRECONDITION: the daemon has no storage, no step has closed, or a rewind has undone the
  // step meanwhile; RESOURCE_EXHAUSTED, DATA_LOSS: its disk is full, or fails; UNIMPLEMENTED: it is older than this.
  virtual absl::StatusOr<v1::CheckpointResponse> Checkpoint(const std::string& run_id) = 0;
  // Versions of the run's weights that have names, where its spec has `follow`: as v1::FollowService says of each call.
  // UNIMPLEMENTED: the daemon is older than this. With several daemons a version is chosen by its name alone; what was named on
  // some of them alone, since one failed, is listed as unreadable, and the error says so.
  virtual absl::StatusOr<v1::TagVersionResponse> TagVersion(const v1::TagVersionRequest& request) = 0;
  virtual absl::Status UntagVersion(const std::string& run_id, const std::string& name) = 0;
  virtual absl::StatusOr<v1::ListVersionsResponse> ListVersions(const std::string& run_id) = 0;
  // As PullServed, of the request's `version`; it names the run and, if not all of them, the tensors, with digests or none.
  virtual absl::Status PullVersion(const v1::PullRequest& request,
                                   const std::function<absl::Status(const ServedPiece&)>& sink) = 0;
  // What is on the daemon's disk of the run, also when it is there alone.
  virtual absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(const std::string& run_id) = 0;
  // Takes a run back to the checkpoint of this step, as Rewind does to a snapshot; later checkpoints count no more.
  // from: a folder on the daemon's machine, beneath its storage.import_dir, of the run or of one checkpoint, that the
  // checkpoint is brought from; step 0 is then the newest there, and a run that is not there is created. PERMISSION_DENIED:
  // the daemon may not read there.
  virtual absl::StatusOr<v1::RestoreResponse> Restore(const std::string& run_id, uint64_t step,
                                                      const std::string& from = "") = 0;

  // Takes the rank and opens the step stream. May be called again after a rewind; weights must then be bound anew. The
  // client reads the run's spec from the daemon to know the tensors.
  virtual absl::StatusOr<Attachment> Attach(const AttachOptions& options) = 0;
  // Gives the rank back, as the destructor does: at once, unless a step is open; then its lease has to run out, for which
  // Attach waits (wait_s). Attach may be called again.
  virtual void Detach() = 0;
  // Uploads weights, and optimizer state if the run is to go on from some, before the first step. Returns the digests
  // of what the daemon then serves, by tensor index. FAILED_PRECONDITION while a step is open. Of several ranks one does so, and
  // the others begin no step before GetRun says RunStatus.weights_loaded: the daemon ends the session of one that does. Each
  // call brings all tensors, and one that the daemon refuses leaves the run without weights.
  //
  // `replace`: in place of what the run has, between two steps; what is not named stays. It waits until every connected
  // rank has the last step's result. FAILED_PRECONDITION while a step is open. Then every session has ended as by a
  // rewind, also this one's: Attach again, and bind weights anew. If the answer is lost, the status is RewoundTo's, and
  // the upload may have been taken over.
  //
  // `sent`: called, in the course of the call, with how many of the tensors' bytes were written to the connection so far; after a
  // lost connection it begins anew.
  virtual absl::StatusOr<std::vector<uint64_t>> LoadWeights(absl::Span<const TensorView> tensors, bool replace = false,
                                                            const std::function<void(uint64_t bytes)>& sent = {}) = 0;
  // Passes the weights of the named tensors (empty = all) to `sink`, in the course of the call, in consecutive pieces of
  // whole chunks; `offset_bytes` is within the tensor, or its shard. A tensor may start again at offset 0. Weights that are
  // served in int8 or fp8 are decoded to the tensor's dtype. `snapshot`: the step of one of RunStatus.snapshot_steps;
  // 0: the latest weights. FAILED_PRECONDITION when that snapshot is not, or no longer, kept. `digests`, unless empty:
  // of the weights that the caller has of each of `tensors`, as in Attachment::digests; tensors whose digest is the
  // same are left out. `shards`: by tensor, what is pulled of it, as in AttachOptions; not beside digests of the same
  // tensors.
  virtual absl::Status Pull(const std::string& run_id, absl::Span<const uint32_t> tensors,
                            const std::function<absl::Status(uint32_t tensor, uint64_t offset_bytes,
                                                             absl::Span<const std::byte> piece, uint64_t step)>& sink,
                            uint64_t snapshot = 0, absl::Span<const uint64_t> digests = {},
                            const Shards& shards = {}) = 0;
  // The same, without decoding: weights as the daemon serves them.
  virtual absl::Status PullServed(const std::string& run_id, absl::Span<const uint32_t> tensors,
                                  const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot = 0,
                                  absl::Span<const uint64_t> digests = {}, const Shards& shards = {}) = 0;

  // As PullServed, for these of v1::PullRequest.slots; all that comes of a tensor is of one update. A tensor that is
  // updated meanwhile begins anew at element 0 of its first slot. average: in place of the weights, in the slots "weights"
  // and "master", their average with this decay, one of v1::RunSpec.averages. UNIMPLEMENTED: the daemon is older than that.
  virtual absl::Status PullState(const std::string& run_id, absl::Span<const uint32_t> tensors,
                                 absl::Span<const std::string> slots,
                                 const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot = 0,
                                 const Shards& shards = {}, std::optional<double> average = {}) = 0;

  // Says where the weights of `tensor` are written when they return: in the serving format if that is fp32, bf16 or
  // fp16, otherwise decoded to the tensor's dtype; in host memory or, with AttachOptions::gpu, in a GPU's, where each piece is a
  // copy of its own, done before the step is. nullptr: they are dropped. The client's reader thread writes them
  // between the tensor's Push and the end of the step, and at no other time; of a tensor that only other ranks push, after
  // EndStep or MeasureStep. Nothing is bound anew in between (FAILED_PRECONDITION).
  virtual absl::Status BindWeights(uint32_t tensor, void* destination, uint64_t bytes) = 0;
  // As BindWeights, but writes codes and scales as they are served, for a trainer that computes in int8 or fp8.
  // `scales`: one for each row of the last dimension (int8-row), one (int8-tensor), or none.
  virtual absl::Status BindServed(uint32_t tensor, void* codes, uint64_t bytes, absl::Span<float> scales) = 0;

  // INVALID_ARGUMENT names a value that the run's rule lacks or no daemon takes, or says that there are more micro-batches
  // than the run's accumulation.
  virtual absl::Status BeginStep(const StepValues& values) = 0;
  // Takes a copy of `gradient`, which is in the group's gradient format or else in the tensor's dtype. To be called at
  // most once for each tensor and micro-batch. A small one waits for others, half a millisecond at most and not beyond the
  // end of the micro-batch, since waking the daemon costs as much as sending several.
  virtual absl::Status Push(uint32_t tensor, absl::Span<const std::byte> gradient) = 0;
  // Ends a micro-batch that is not the step's last; later pushes belong to the next one. Tensors not pushed in it are
  // sent as absent: they count as zero. next_is_last: the next one is the last, although BeginStep announced more.
  virtual absl::Status EndMicro(std::optional<double> loss, bool next_is_last = false) = 0;
  // Ends the last micro-batch of a staged run's step, and asks for the norm of the whole step; EndStep follows, and no
  // Push. The future is ready when every rank has called this or EndStep. Once a step. FAILED_PRECONDITION: the run's
  // commit is release, or the place is wrong; UNIMPLEMENTED: the daemon is older than this. Then the step goes on.
  virtual std::future<absl::StatusOr<MeasuredStep>> MeasureStep(std::optional<double> loss) = 0;
  // Ends the last micro-batch, and the step. `loss`: of that micro-batch, unless MeasureStep had it. The future is
  // ready when the step has closed and every weight has arrived; if there are several ranks, it closes when all have
  // ended it, or without one of them. INVALID_ARGUMENT, and the step is still open: `values` are too large, or such as
  // BeginStep refuses, or max_grad_norm is not above 0, or beside tensor_clip. FAILED_PRECONDITION, UNIMPLEMENTED, likewise:
  // groups, max_grad_norm or discard in a run whose commit is release, or with a daemon that does not know them.
  virtual std::future<absl::StatusOr<StepResult>> EndStep(std::optional<double> loss,
                                                          const StepEndValues& values = {}) = 0;

  // After EndStep: waits up to timeout_s for the weights of `tensor`, which may arrive ahead of the future. False: not
  // yet. If the tensor gets none, true when the step has closed; with no step open, true at once. An error: the client
  // failed.
  virtual absl::StatusOr<bool> AwaitWeights(uint32_t tensor, double timeout_s) = 0;

  // The step to be sent next (or open now).
  virtual uint64_t step() const = 0;
  // Whether large gradients go to memory of a GPU now (AttachOptions::gpu), so that those that lie in one pass by the host.
  virtual bool shares_gpu() const = 0;
  // Why the client failed, or OK.
  virtual absl::Status status() const = 0;

 protected:
  Client() = default;
};

}  // namespace ballast
