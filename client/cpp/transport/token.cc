#include "client/cpp/transport/token.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/tls/token_file.h"

namespace ballast {
namespace {

class Bringer final : public grpc::experimental::Interceptor {
 public:
  explicit Bringer(TokenFile* token) : token_(token) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(grpc::experimental::InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->emplace("authorization", absl::StrCat("Bearer ", token_->Current()));
    }
    methods->Proceed();
  }

 private:
  TokenFile* const token_;  // the channel's factory holds it
};

class BringerFactory final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit BringerFactory(std::shared_ptr<TokenFile> token) : token_(std::move(token)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo*) override {
    return new Bringer(token_.get());
  }

 private:
  const std::shared_ptr<TokenFile> token_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<TokenFile>> TokenFile::Open(const std::string& file) {
  const FileStamp stamp = StampOf(file);  // before it is read: what changes meanwhile is read again
  absl::StatusOr<std::string> token = ReadToken(file);
  if (!token.ok()) return token.status();
  return std::shared_ptr<TokenFile>(new TokenFile(file, stamp, *std::move(token)));
}

std::string TokenFile::Current() {
  absl::MutexLock lock(&mu_);
  if (const FileStamp now = StampOf(file_); !(now == stamp_)) {
    stamp_ = now;
    if (absl::StatusOr<std::string> token = ReadToken(file_); token.ok()) token_ = *std::move(token);
  }
  return token_;
}

absl::StatusOr<Interceptors> BringToken(const ClientOptions& options) {
  Interceptors interceptors;
  if (options.token_file.empty()) return interceptors;
  // Not at an abstract socket, whose name whoever is first may take.
  if (!options.tls.on() && !options.server.starts_with("unix:")) {
    return absl::FailedPreconditionError(
        absl::StrCat("the token of ", options.token_file, " is sent over TLS or a Unix socket alone, and ",
                     options.server, " is neither: give the TLS files, server=\"unix:/PATH\", or no token"));
  }
  absl::StatusOr<std::shared_ptr<TokenFile>> token = TokenFile::Open(options.token_file);
  if (!token.ok()) return token.status();
  interceptors.push_back(std::make_unique<BringerFactory>(*std::move(token)));
  return interceptors;
}

}  // namespace ballast
