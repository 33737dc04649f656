#include "tests/client/fake_daemon.h"

#include <algorithm>

#include "proto/bitmap.h"
#include "proto/checksum.h"

#include "client/cpp/wire/tensor_table.h"
#include "tests/client/fake_admin.h"

namespace ballast {
v1::RunSpec FakeSpec() {
  v1::RunSpec spec;
  spec.set_run_id("r");
  const auto add = [&](const char* name, const std::vector<int64_t>& shape, const char* dtype) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(name);
    tensor->set_dtype(dtype);
    tensor->mutable_shape()->Add(shape.begin(), shape.end());
  };
  add("a", {10}, "fp32");
  add("b", {2, 2}, "fp32");
  add("c", {}, "fp32");
  add("d", {2, 3}, "bf16");
  spec.add_groups()->set_rule("adamw");
  return spec;
}

std::string Updated(const std::string& gradient, uint64_t step) {
  std::string weights = gradient;
  for (char& byte : weights) byte = static_cast<char>(static_cast<uint64_t>(byte) + step);
  return weights;
}

FakeDaemon::FakeDaemon(FakeOptions options) : options_(std::move(options)), admin_(std::make_unique<Admin>(this)) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(this);
  builder.RegisterService(admin_.get());
  server_ = builder.BuildAndStart();
  address_ = "127.0.0.1:" + std::to_string(port);
}

FakeDaemon::~FakeDaemon() { Shutdown(); }

void FakeDaemon::Shutdown() { server_->Shutdown(std::chrono::system_clock::now()); }

void FakeDaemon::CutLoads() {
  absl::MutexLock lock(&mu_);
  cuts_loads_ = true;
}

bool FakeDaemon::Passes() {
  absl::MutexLock lock(&mu_);
  const int moment = seen_.moments++;
  return moment != options_.cut_at_moment && !options_.also_cut_at_moments.contains(moment);
}

void FakeDaemon::ForgetRun() {
  absl::MutexLock lock(&mu_);
  forgot_ = true;
}

void FakeDaemon::ReadRunBack(uint64_t step, const std::string& restored) {
  absl::MutexLock lock(&mu_);
  forgot_ = true;
  read_back_ = step;
  restored_ = restored;
}

void FakeDaemon::CutNow() {
  absl::MutexLock lock(&mu_);
  if (context_ != nullptr) context_->TryCancel();
}

void FakeDaemon::Inject(v1::TrainResponse response) {
  absl::MutexLock lock(&mu_);
  injected_.push_back(std::move(response));
}

FakeDaemon::Seen FakeDaemon::seen() const {
  absl::MutexLock lock(&mu_);
  return seen_;
}

void FakeDaemon::AwaitReceived(int messages) const {
  absl::MutexLock lock(&mu_);
  const auto there = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return seen_.received >= messages; };
  mu_.Await(absl::Condition(&there));
}

void FakeDaemon::AwaitStreamEnd() const {
  absl::MutexLock lock(&mu_);
  const auto over = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return streams_ == 0; };
  mu_.Await(absl::Condition(&over));
}

uint64_t FakeDaemon::elements(uint32_t tensor) const {
  uint64_t n = 1;
  for (const int64_t extent : options_.spec.tensors(static_cast<int>(tensor)).shape())
    n *= static_cast<uint64_t>(extent);
  return n;
}
uint64_t FakeDaemon::element_bytes(uint32_t tensor) const {
  return FormatBytes(options_.spec.tensors(static_cast<int>(tensor)).dtype());
}
uint64_t FakeDaemon::chunks(uint32_t tensor) const {
  return (elements(tensor) + options_.chunk_elements - 1) / options_.chunk_elements;
}
bool FakeDaemon::applies(uint32_t tensor) const {
  const auto& spared = options_.result.tensors_not_applied();
  return options_.result.outcome() != v1::STEP_OUTCOME_ABORTED &&
         options_.result.outcome() != v1::STEP_OUTCOME_SKIPPED &&
         std::find(spared.begin(), spared.end(), tensor) == spared.end();
}

grpc::Status FakeDaemon::CreateRun(grpc::ServerContext* context, const v1::CreateRunRequest*,
                                   v1::CreateRunResponse* response) {
  if (!Passes()) return Cut();
  {
    absl::MutexLock lock(&mu_);
    ++seen_.creations;
    if (!creation_refusals_.empty()) return Tell(context, &creation_refusals_);
  }
  response->set_created(true);
  return Passes() ? grpc::Status::OK : Cut();
}

grpc::Status FakeDaemon::Tell(grpc::ServerContext* context, std::deque<Refusal>* refusals) {
  const Refusal refusal = refusals->front();
  refusals->pop_front();
  if (refusal.retry_after_ms > 0) {
    context->AddTrailingMetadata("ballast-retry-after-ms", std::to_string(refusal.retry_after_ms));
  }
  return refusal.status;
}

grpc::Status FakeDaemon::Attach(grpc::ServerContext* context, const v1::AttachRequest* request,
                                v1::AttachResponse* response) {
  if (!Passes()) return Cut();
  if (grpc::Status s = Grant(context, *request, response); !s.ok()) return s;
  if (Passes()) return grpc::Status::OK;
  // A session that its client never heard of: it has a lease.
  if (request->session_token().empty()) RefuseAttach({{grpc::StatusCode::ALREADY_EXISTS, "taken"}, 5});
  return Cut();
}

grpc::Status FakeDaemon::Grant(grpc::ServerContext* context, const v1::AttachRequest& request,
                               v1::AttachResponse* response) {
  absl::MutexLock lock(&mu_);
  seen_.attaches.push_back(request);
  if (forgot_ && read_back_ && request.session_token().empty()) {
    forgot_ = false;
    SetBackTo(*read_back_ + 1);
  }
  if (forgot_) return {grpc::StatusCode::NOT_FOUND, "no run 'r'"};
  if (!refusals_.empty()) return Tell(context, &refusals_);
  response->set_session_token("token");
  response->set_resume_step(step_);
  response->set_lease_s(options_.lease_s);
  response->set_chunk_elements(options_.chunk_elements);
  response->set_credit_bytes(options_.credit_bytes);
  response->set_weights_loaded(true);
  response->set_loaded_here(loaded_here_ && !request.session_token().empty());
  if (request.want_digests()) response->mutable_digests()->Add(digests_.begin(), digests_.end());
  response->set_client_state(client_state_);
  response->set_client_state_step(client_state_.empty() ? 0 : step_ - 1);
  if (last_result_) *response->mutable_last_result() = *last_result_;
  response->set_step_open(open_);
  if (!open_) return grpc::Status::OK;
  std::vector<bool> applied(static_cast<size_t>(options_.spec.tensors_size()));
  for (uint32_t tensor = 0; tensor < applied.size(); ++tensor) {
    applied[tensor] = updated_.contains(tensor);
    std::vector<bool> bits(chunks(tensor));
    for (uint64_t k = 0; k < bits.size(); ++k) bits[k] = held_.contains({tensor, k});
    v1::ChunksHeld* held = response->add_held();
    held->set_tensor(tensor);
    held->set_chunks(PackBits(bits));
  }
  response->set_tensors_applied(PackBits(applied));
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::LoadState(grpc::ServerContext* context, grpc::ServerReader<v1::LoadStateRequest>* reader,
                                   v1::LoadStateResponse* response) {
  std::map<uint32_t, std::string> uploaded;
  bool first = true;
  if (!Passes()) return Cut();
  {
    absl::MutexLock lock(&mu_);
    if (!load_refusals_.empty()) return Tell(context, &load_refusals_);
  }
  for (v1::LoadStateRequest request; reader->Read(&request); first = false) {
    if (!Passes()) return Cut();
    if (first && request.session_token() != "token") return {grpc::StatusCode::NOT_FOUND, "no such session"};
    if (Crc32c(BytesOf(request.data())) != request.crc32c()) return {grpc::StatusCode::DATA_LOSS, "checksum differs"};
    uploaded[request.tensor()] += request.data();
  }
  for (const auto& [tensor, bytes] : uploaded) response->add_digests(WeightDigest(BytesOf(bytes)));
  {
    absl::MutexLock lock(&mu_);
    if (cuts_loads_) return Cut();
    if (loaded_here_) return {grpc::StatusCode::FAILED_PRECONDITION, "these weights are here already"};
    loaded_here_ = true;
    digests_.assign(response->digests().begin(), response->digests().end());
    seen_.uploaded = std::move(uploaded);
  }
  return Passes() ? grpc::Status::OK : Cut();
}

grpc::Status FakeDaemon::Pull(grpc::ServerContext* context, const v1::PullRequest* request,
                              grpc::ServerWriter<v1::Weights>* writer) {
  if (!Passes()) return Cut();
  Responses responses;
  {
    absl::MutexLock lock(&mu_);
    if (!pull_refusals_.empty()) return Tell(context, &pull_refusals_);
    for (const auto& [tensor, bytes] : updated_) {
      const auto& wanted = request->tensors();
      const auto place = std::find(wanted.begin(), wanted.end(), tensor);
      if (!wanted.empty() && place == wanted.end()) continue;
      const auto back = seen_.pulled > 0 ? options_.back_at.find(tensor) : options_.back_at.end();
      if (back != options_.back_at.end() && *(request->digests().begin() + (place - wanted.begin())) == back->second)
        continue;
      SendWeights(tensor, step_ - 1, &responses);
    }
  }
  for (const v1::TrainResponse& response : responses) {
    if (!Passes()) return Cut();
    writer->Write(response.weights());
    absl::MutexLock lock(&mu_);
    ++seen_.pulled;
  }
  return Passes() ? grpc::Status::OK : Cut();
}

}  // namespace ballast
