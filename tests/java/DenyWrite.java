import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.common.acl.AccessControlEntry;
import org.apache.kafka.common.acl.AclBinding;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.acl.AclPermissionType;
import org.apache.kafka.common.resource.PatternType;
import org.apache.kafka.common.resource.ResourcePattern;
import org.apache.kafka.common.resource.ResourceType;

/** Lets a principal describe a topic and not write to it. */
class DenyWrite {
    public static void main(String[] arguments) throws Exception {
        ResourcePattern topic = new ResourcePattern(ResourceType.TOPIC, arguments[1], PatternType.LITERAL);
        AclBinding describe = binding(topic, arguments[2], AclOperation.DESCRIBE, AclPermissionType.ALLOW);
        AclBinding write = binding(topic, arguments[2], AclOperation.WRITE, AclPermissionType.DENY);
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", arguments[0]))) {
            admin.createAcls(List.of(describe, write)).all().get();
        }
    }

    private static AclBinding binding(
            ResourcePattern topic, String principal, AclOperation operation, AclPermissionType permission) {
        return new AclBinding(topic, new AccessControlEntry(principal, "*", operation, permission));
    }
}
