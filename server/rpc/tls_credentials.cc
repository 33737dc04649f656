#include "server/rpc/tls_credentials.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include <string>

namespace ballast {
namespace {

class TlsServerCredentials final : public grpc::ServerCredentials {
 public:
  TlsServerCredentials(const CertificateKeeper* keeper, bool require_clients) : keeper_(keeper) {
    credentials_ =
        grpc_ssl_server_credentials_create_with_options(grpc_ssl_server_credentials_create_options_using_config_fetcher(
            require_clients ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                            : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
            Fetch, this));
  }
  ~TlsServerCredentials() override { grpc_server_credentials_release(credentials_); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  static grpc_ssl_certificate_config_reload_status Fetch(void* self, grpc_ssl_server_certificate_config** config) {
    return static_cast<TlsServerCredentials*>(self)->Give(config);
  }

  // Called at the start of the server, and then at the beginning of each handshake.
  grpc_ssl_certificate_config_reload_status Give(grpc_ssl_server_certificate_config** config) {
    const std::shared_ptr<const Certificates> now = keeper_->current();
    if (now->number == given_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair{.private_key = now->own.key.c_str(),
                                          .cert_chain = now->own.certificate.c_str()};
    // gRPC insists on authorities, also where it asks for no certificate and so looks at none.
    const std::string& clients = now->clients.certificates.empty() ? now->own.certificate : now->clients.certificates;
    *config = grpc_ssl_server_certificate_config_create(clients.c_str(), &pair, 1);
    if (*config == nullptr) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_FAIL;
    given_ = now->number;
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const CertificateKeeper* const keeper_;
  grpc_server_credentials* credentials_ = nullptr;
  uint64_t given_ = 0;  // Certificates::number of what gRPC has
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> TlsCredentialsOf(const CertificateKeeper* keeper, bool require_clients) {
  return std::make_shared<TlsServerCredentials>(keeper, require_clients);
}

}  // namespace ballast
